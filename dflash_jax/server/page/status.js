// The status view: what the server reports about itself, updated in place.

import { byId, count, duration, element, figure, size } from "./dom.js";
import { parseMetrics } from "./monitor.js";

const STATES = {
  connecting: "Connecting",
  ready: "Ready",
  starting: "Starting",
  refused: "API key needed",
  failed: "Failed",
  offline: "Not reachable",
};

/** A titled list of names and values. Values change in place, so that selected text stays. */
class Facts {
  constructor(parent, title, level = "h2") {
    this.list = element("dl");
    this.values = new Map();
    parent.append(element("section", { class: "facts-box" }, element(level, {}, title), this.list));
  }

  /** Show values by name; null leaves one out. */
  show(facts) {
    for (const [name, value] of Object.entries(facts)) {
      let node = this.values.get(name);
      if (value === null || value === undefined) {
        node?.parentElement.remove();
        this.values.delete(name);
        continue;
      }
      if (!node) {
        node = element("dd");
        this.values.set(name, node);
        this.list.append(element("div", {}, element("dt", {}, name), node));
      }
      const text = String(value);
      if (node.textContent !== text) node.textContent = text;
    }
  }
}

/** The status of one model: its configuration, memory, programs and plan. */
class ModelStatus {
  constructor(parent, id) {
    this.node = element("section", { class: "model-status", "aria-label": `Model ${id}` });
    this.node.append(element("h2", {}, id));
    const boxes = element("div", { class: "boxes" });
    this.facts = new Facts(boxes, "Model", "h3");
    this.memory = new Facts(boxes, "Memory", "h3");
    this.programs = element("tbody");
    const head = ["Programs", "State", "Compiled"].map((name) =>
      element("th", { scope: "col" }, name),
    );
    const table = element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...head)),
      this.programs,
    );
    boxes.append(
      element("section", { class: "facts-box" }, element("h3", {}, "Compilation"), table),
    );
    const plan = element("details", {}, element("summary", {}, "Plan"));
    this.plan = new Facts(plan, "Options of the plan", "h3");
    this.node.append(boxes, plan);
    this.rows = new Map();
    parent.append(this.node);
  }

  show(model, memory) {
    const { plan } = model;
    this.facts.show({
      Target: model.target ?? "loading",
      Drafter: plan ? (model.drafter ?? "none") : null,
      Block: plan && model.drafter ? plan.block : null,
      Rows: plan?.rows,
      "Context length": model.max_model_len?.toLocaleString("en"),
      "Tool calls": plan ? (model.tool_calls ?? "not supported") : null,
    });
    this.memory.show(memory);
    if (plan)
      this.plan.show(Object.fromEntries(Object.entries(plan).map(([k, v]) => [k, shown(v)])));
    for (const [variant, found] of Object.entries(model.programs ?? {}))
      this.#program(variant, found);
  }

  #program(variant, { state, compiled, of, error }) {
    let row = this.rows.get(variant);
    if (!row) {
      const bar = element("progress", { "aria-label": `Compiled ${variant} programs` });
      const cells = [element("td"), element("td", {}, bar, element("span"))];
      row = element("tr", {}, element("th", { scope: "row" }, titled(variant)), ...cells);
      this.rows.set(variant, row);
      this.programs.append(row);
    }
    const [, words, progress] = row.children;
    words.textContent = error ? `${state}: ${error}` : state;
    progress.firstChild.max = Math.max(of, 1);
    progress.firstChild.value = compiled;
    progress.lastChild.textContent = ` ${compiled} of ${of}`;
  }
}

function titled(name) {
  const text = name.replaceAll("_", " ");
  return text[0].toUpperCase() + text.slice(1);
}

function shown(value) {
  return value !== null && typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** Add the samples of a metric that have one value of a label; return values and sums. */
function sums(metrics, name, label) {
  const found = new Map();
  for (const { labels, value } of metrics.get(name) ?? []) {
    if (value) found.set(labels[label], (found.get(labels[label]) ?? 0) + value);
  }
  return [...found];
}

/** Shows the monitor's findings in the header, the banner and the status view. */
export class Status {
  constructor() {
    const parent = byId("status-facts");
    this.requests = new Facts(parent, "Requests");
    this.speculation = new Facts(parent, "Speculation");
    this.caches = new Facts(parent, "Host and caches");
    this.models = new Map();
    this.before = "connecting";
    this.timer = 0;
  }

  /** Show the state in the header, and announce that the server left or came back. */
  showState(monitor) {
    const { state, words } = monitor;
    byId("connection").dataset.state = state;
    byId("state").textContent = STATES[state];
    // In other states the banner has the words.
    byId("status-words").textContent = state === "ready" ? "The server is ready." : "";
    const banner = byId("banner");
    if (state !== "ready" && state !== "connecting") {
      clearTimeout(this.timer);
      const where = state === "refused" ? " Enter it in the settings." : "";
      const text = `${words}${where}`;
      if (banner.textContent !== text) banner.textContent = text;
      banner.dataset.kind = state === "starting" ? "note" : "problem";
    } else if (state === "ready" && this.before !== "ready") {
      const gone = ["offline", "starting", "failed"].includes(this.before);
      banner.textContent = gone ? "The server is back." : "";
      if (this.before === "starting" && !this.wasOffline)
        banner.textContent = "The server is ready.";
      banner.dataset.kind = "good";
      this.timer = setTimeout(() => (banner.textContent = ""), 6000);
    }
    this.wasOffline = state === "offline" || (this.wasOffline && state === "starting");
    this.before = state;
  }

  /** Show properties and metrics in the status view. */
  showDetails(monitor) {
    if (monitor.metrics === null || monitor.props === null) return;
    const metrics = parseMetrics(monitor.metrics);
    const total = (name) => (metrics.get(name) ?? []).reduce((sum, each) => sum + each.value, 0);
    this.#showRequests(monitor.props, metrics, total);
    this.#showSpeculation(metrics, total);
    const looked = total("prefix_cache_queries_total");
    const usage = metrics.get("kv_cache_usage_perc") ?? []; // of each model
    this.caches.show({
      "Host memory": total("resident_memory_bytes") ? size(total("resident_memory_bytes")) : null,
      "KV cache in use": `${Math.round(Math.max(0, ...usage.map((each) => each.value)) * 100)} %`,
      "Prompt tokens from the cache": looked
        ? `${Math.round((total("prefix_cache_hits_total") / looked) * 100)} % of ${count(looked, "token")}`
        : "none yet",
      "Spent compiling": duration(total("jit_compile_seconds_total")),
      Version: monitor.props.build_info,
    });
    const served = new Set(monitor.props.models.map((model) => model.id));
    for (const [id, shown] of this.models) {
      if (served.has(id)) continue;
      shown.node.remove(); // another server is at this address
      this.models.delete(id);
    }
    for (const model of monitor.props.models) {
      if (!this.models.has(model.id)) {
        this.models.set(model.id, new ModelStatus(byId("status-models"), model.id));
      }
      const parts = (metrics.get("memory_bytes") ?? []).filter(
        (each) => each.labels.model === model.id,
      );
      const known = parts.filter((each) => each.value); // programs are not known on a CPU
      const named = known.map(({ labels, value }) => [titled(labels.part), size(value)]);
      this.models.get(model.id).show(model, Object.fromEntries(named));
    }
  }

  #showRequests(props, metrics, total) {
    const ends = sums(metrics, "request_success_total", "finished_reason");
    const failures = sums(metrics, "request_failure_total", "status");
    const first = total("time_to_first_token_seconds_count");
    const spent = total("tokens_predicted_seconds_total");
    const queues = props.models.map((model) => model.plan?.queue).filter(Boolean);
    this.requests.show({
      Running: total("num_requests_running"),
      Waiting: `${total("num_requests_waiting")}, at most ${queues.join(" and ") || "unknown"} in all`,
      Finished:
        ends.map(([end, value]) => `${value} ${end.replace("_", " ")}`).join(", ") || "none",
      Failed: failures.map(([status, value]) => `${value} with ${status}`).join(", ") || "none",
      Cancelled: total("request_cancelled_total"),
      "Output tokens": total("generation_tokens_total").toLocaleString("en"),
      "Time to first token": first
        ? `${duration(total("time_to_first_token_seconds_sum") / first)} on average`
        : null,
      "Decoding speed": spent
        ? `${figure(total("generation_tokens_total") / spent)} tok/s per request`
        : null,
    });
  }

  #showSpeculation(metrics, total) {
    const rounds = total("spec_decode_num_drafts_total");
    const drafted = total("spec_decode_num_draft_tokens_total");
    const accepted = total("spec_decode_num_accepted_tokens_total");
    const plain = sums(metrics, "spec_decode_disabled_total", "reason");
    this.speculation.show({
      Rounds: rounds.toLocaleString("en"),
      "Acceptance length": rounds
        ? `${figure(1 + accepted / rounds)} tokens per round`
        : "none yet",
      "Drafts accepted": drafted ? `${Math.round((accepted / drafted) * 100)} %` : "none yet",
      "Plain rounds":
        plain.map(([reason, value]) => `${value} ${reason.replaceAll("_", " ")}`).join(", ") ||
        "none",
    });
  }
}
