// Shows one answer: text or tokens, reasoning, tool calls, errors, figures and its buttons.

import { summary } from "./answer.js";
import { count, duration, element, figure, perFrame } from "./dom.js";
import { render } from "./markdown.js";
import { TokenView } from "./tokens.js";

const FINISHES = { length: "cut by the length limit", tool_calls: "calls tools" };

/** Whether the reader chose the token view. */
export function showsTokens() {
  return document.querySelector('input[name="view"]:checked').value === "tokens";
}

/** Return an error as a message with the server's words. */
export function errorNode(error, retry = null) {
  const status = error.status ? `${error.status}: ` : "";
  const wait = error.retry ? ` Try again in ${count(error.retry, "second")}.` : "";
  const again = retry ? element("button", { type: "button", onclick: retry }, "Try again") : null;
  const words = element("p", {}, `${status}${error.message}${wait}`);
  return element("div", { class: "error", role: "alert" }, words, again);
}

/** The element of an answer, `node`; `draw` shows changes of the answer in the next frame. */
export class AnswerView {
  /**
   * @param {Answer} answer
   * @param {{regenerate: () => void, resultsGiven: () => void}} actions
   */
  constructor(answer, actions) {
    this.answer = answer;
    this.actions = actions;
    this.isLast = true;
    this.tokens = new TokenView();
    this.text = element("div", { class: "text markdown" });
    this.note = element("p", { class: "note" });
    this.thought = element("div", { class: "text" });
    const label = element("summary", {}, "Reasoning");
    this.reasoning = element("details", { class: "reasoning", hidden: true }, label, this.thought);
    this.calls = element("div", { class: "calls" });
    this.problem = element("div");
    this.footer = element("footer");
    const head = element("h2", { class: "who" }, "Model");
    this.node = element(
      "article",
      { class: "message assistant", "aria-busy": "true" },
      head,
      this.note,
      this.reasoning,
      this.text,
      this.tokens.node,
      this.calls,
      this.problem,
      this.footer,
    );
    this.shown = { content: null, error: null, footer: null };
    this.draw = perFrame(() => this.#draw());
    this.draw();
  }

  /** Say whether the answer is the conversation's last, which can be regenerated. */
  setLast(isLast) {
    this.isLast = isLast;
    this.shown.footer = null;
    this.draw();
  }

  #draw() {
    const { answer } = this;
    const asTokens = showsTokens() && answer.rounds.length > 0;
    this.node.setAttribute("aria-busy", String(answer.running));
    this.note.textContent = answer.running && answer.isEmpty ? answer.note || "…" : "";
    this.note.hidden = !this.note.textContent;
    this.reasoning.hidden = !answer.reasoning || asTokens;
    if (this.thought.textContent !== answer.reasoning) this.thought.textContent = answer.reasoning;
    this.tokens.node.hidden = !asTokens;
    this.text.hidden = asTokens || !answer.content;
    if (asTokens) {
      this.tokens.update(answer.rounds);
    } else if (this.shown.content !== answer.content) {
      this.shown.content = answer.content;
      this.text.replaceChildren(render(answer.content));
    }
    this.#drawCalls();
    this.#drawError();
    this.#drawFooter();
  }

  #drawError() {
    const { error } = this.answer;
    if (error && this.shown.error !== error) {
      this.problem.replaceChildren(errorNode(error, () => this.actions.regenerate()));
      this.shown.error = error;
    }
    if (error && !this.isLast) this.problem.querySelector("button")?.remove();
  }

  #drawCalls() {
    this.answer.calls.forEach((call, i) => {
      let node = this.calls.children[i];
      if (!node) {
        node = element(
          "section",
          { class: "call", "aria-label": "Tool call" },
          element("h3", {}, ""),
          element("pre", { class: "arguments", tabindex: "0" }, ""),
        );
        this.calls.append(node);
      }
      const [name, args] = node.children;
      const text = this.answer.running ? call.arguments : indented(call.arguments);
      if (name.textContent !== call.name) name.textContent = call.name;
      if (args.textContent !== text) args.textContent = text;
      const asks = !this.answer.running && this.isLast && call.result === null;
      if (asks && node.children.length === 2) node.append(this.#resultForm(call));
      if (!this.isLast) node.querySelector("form")?.remove(); // the conversation went on
    });
  }

  #resultForm(call) {
    const input = element("textarea", { rows: "2", spellcheck: "false" });
    const form = element(
      "form",
      { class: "result" },
      element("label", {}, `Result of ${call.name}`, input),
      element("button", { type: "submit" }, "Give result"),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      call.result = input.value;
      const shown = element("pre", { tabindex: "0" }, call.result);
      form.replaceWith(element("div", { class: "result" }, "Result", shown));
      const next = this.calls.querySelector("form textarea");
      if (next) next.focus();
      else this.actions.resultsGiven();
    });
    return form;
  }

  #drawFooter() {
    const { answer } = this;
    const parts = figures(answer);
    const key = `${parts.join()} ${answer.running} ${this.isLast}`;
    if (key === this.shown.footer) return;
    this.shown.footer = key;
    const again = { type: "button", onclick: () => this.actions.regenerate() };
    const button = !answer.running && this.isLast && !answer.error;
    this.footer.replaceChildren(
      element("span", {}, parts.join(" · ")),
      ...answer.warnings.map((text) => element("p", { class: "warning" }, text)),
      button ? element("button", again, "Regenerate") : "",
    );
    this.footer.hidden = !parts.length && !button && !answer.warnings.length;
  }
}

/** Return the figures of an answer as short texts. */
export function figures(answer) {
  const parts = [];
  const found = summary(answer.rounds);
  if (answer.tokens) parts.push(count(answer.tokens, "token"));
  if (found.length !== null) parts.push(`${figure(found.length)} per round`);
  const speed = answer.timings?.predicted_per_second || found.speed;
  if (speed) parts.push(`${figure(speed)} tok/s`);
  if (!answer.running && !answer.isEmpty)
    parts.push(duration((answer.ended - answer.started) / 1000));
  if (answer.stopped) parts.push("stopped");
  if (FINISHES[answer.finish]) parts.push(FINISHES[answer.finish]);
  return parts;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
