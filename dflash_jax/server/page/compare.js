// The same prompt with and without drafts: two streams, their times, and whether they are equal.

import { Answer, summary } from "./answer.js";
import { errorNode } from "./answer_view.js";
import { byId, count, duration, element, figure, perFrame } from "./dom.js";
import { baseRequest, systemMessages } from "./settings.js";

/** Return the place of the first difference of two lists or texts, or -1. */
export function firstDifference(a, b) {
  const shorter = Math.min(a.length, b.length);
  for (let i = 0; i < shorter; i += 1) if (a[i] !== b[i]) return i;
  return a.length === b.length ? -1 : shorter;
}

/** Return all text of an answer, reasoning and calls included. */
function wholeText(answer) {
  const calls = answer.calls.map((call) => `${call.name}(${call.arguments})`);
  return [answer.reasoning, answer.content, ...calls].filter(Boolean).join("\n\n");
}

/** Return the seconds spent decoding: the server's own figure, or this page's. */
function seconds(answer) {
  return (answer.timings?.predicted_ms ?? answer.ended - answer.started) / 1000;
}

class Column {
  constructor(id) {
    this.root = byId(id);
    this.draw = perFrame(() => this.#draw());
    this.start(null);
  }

  start(answer) {
    this.answer = answer;
    this.difference = -1;
    this.text = element("div", { class: "output" });
    this.facts = element("p", { class: "facts" });
    this.problem = element("div");
    this.root.replaceChildren(this.facts, this.problem, this.text);
    if (answer) this.draw();
  }

  #draw() {
    const { answer } = this;
    if (!answer) return;
    const text = wholeText(answer);
    const at = this.difference;
    if (at < 0) this.text.textContent = text;
    else
      this.text.replaceChildren(
        text.slice(0, at),
        element("mark", {}, text.slice(at) || "(ends here)"),
      );
    this.facts.textContent = this.#figures().join(" · ") || answer.note || "…";
    const shown = this.problem.childElementCount > 0;
    if (answer.error && !shown) this.problem.append(errorNode(answer.error));
  }

  #figures() {
    const { answer } = this;
    const found = summary(answer.rounds);
    const speed = answer.timings?.predicted_per_second || found.speed;
    const parts = answer.tokens ? [count(answer.tokens, "token")] : [];
    if (!answer.running) parts.push(duration(seconds(answer)));
    if (speed) parts.push(`${figure(speed)} tok/s`);
    if (found.length !== null) parts.push(`${figure(found.length)} per round`);
    return parts;
  }
}

/** The view that compares speculative with plain decoding. */
export class Compare {
  constructor() {
    this.columns = [new Column("speculative"), new Column("plain")];
    this.verdict = byId("verdict");
    this.abort = null;
    byId("compare-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#run();
    });
    byId("compare-stop").addEventListener("click", () => this.abort?.abort());
  }

  async #run() {
    const content = byId("compare-prompt").value.trim();
    if (!content || this.abort) return;
    this.abort = new AbortController();
    this.#setRunning(true);
    this.#conclude("", "Running.");
    for (const column of this.columns) column.start(null);
    const messages = [...systemMessages(), { role: "user", content }];
    const request = async (speculative) => {
      const { tools, ...body } = await baseRequest();
      const greedy = {
        temperature: 0,
        return_token_ids: true,
        speculative: { enabled: speculative },
      };
      return { ...body, ...greedy, messages };
    };
    const answers = [];
    for (const [i, column] of this.columns.entries()) {
      const answer = new Answer();
      answers.push(answer);
      column.start(answer);
      await answer.run(() => request(i === 0), this.abort.signal, column.draw);
      if (answer.error || answer.stopped) break;
    }
    this.#judge(answers);
    this.abort = null;
    this.#setRunning(false);
  }

  #judge(answers) {
    const [fast, plain] = answers;
    if (answers.some((answer) => answer.error || answer.stopped)) {
      const why = answers.some((answer) => answer.stopped) ? "Stopped" : "One run failed";
      this.#conclude("", `${why}, so there is nothing to compare.`);
      return;
    }
    const known = fast.ids && plain.ids;
    const texts = [wholeText(fast), wholeText(plain)];
    const place = known ? firstDifference(fast.ids, plain.ids) : firstDifference(...texts);
    if (place >= 0) {
      const unit = known ? "token" : "character";
      const at = firstDifference(...texts);
      const ids = known
        ? ` (ids ${fast.ids[place] ?? "none"} and ${plain.ids[place] ?? "none"})`
        : "";
      this.#conclude(
        "differs",
        `Different: the first difference is at ${unit} ${place + 1}${ids}.`,
      );
      for (const column of this.columns) {
        column.difference = at;
        column.draw();
      }
      return;
    }
    const same = known ? `the same ${count(fast.ids.length, "token")}` : "the same text";
    const [a, b] = [seconds(fast), seconds(plain)];
    const ratio = a <= b ? `${figure(b / a)} times as fast` : `${figure(a / b)} times as slow`;
    const drafted =
      fast.timings?.spec_ran === false
        ? ` The server drafted nothing${fast.timings.fallback_reason ? ` (${fast.timings.fallback_reason})` : ""}.`
        : "";
    this.#conclude(
      "equal",
      `Equal: both gave ${same}. Speculative decoding took ${duration(a)}, plain decoding` +
        ` ${duration(b)}: ${ratio}.${drafted}`,
    );
  }

  #conclude(kind, words) {
    this.verdict.className = kind;
    this.verdict.textContent = words;
  }

  #setRunning(running) {
    byId("compare-run").hidden = running;
    byId("compare-stop").hidden = !running;
  }
}
