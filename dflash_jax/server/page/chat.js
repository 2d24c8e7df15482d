// The conversation: messages, streamed answers, tool calls, stop and regenerate.

import { Answer } from "./answer.js";
import { say, sayProgress } from "./announcer.js";
import { AnswerView, showsTokens } from "./answer_view.js";
import { byId, element } from "./dom.js";
import { baseRequest, systemMessages } from "./settings.js";

/** The chat view. Its conversation lives in memory only. */
export class Chat {
  /** @param {Strip} strip  shows the rounds of the latest answer */
  constructor(strip) {
    this.strip = strip;
    this.turns = []; // {role: "user", content}, {role: "assistant", answer, view}
    this.abort = null;
    this.log = byId("log");
    this.form = byId("composer");
    this.input = byId("message");
    this.send = byId("send");
    this.stop = byId("stop");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
    this.input.addEventListener("input", () => this.#fitInput());
    this.stop.addEventListener("click", () => this.abort?.abort());
    byId("new-chat").addEventListener("click", () => this.clear());
    // Streams keep the end of the log in view unless the reader scrolls away from it.
    this.sticks = true;
    this.box = byId("scroll");
    this.box.addEventListener("scroll", () => {
      this.sticks = this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < 60;
    });
    for (const radio of document.getElementsByName("view")) {
      radio.addEventListener("change", () => this.#redraw());
    }
  }

  /** Stop the running answer, and forget the conversation. */
  clear() {
    this.abort?.abort();
    this.abort = null;
    this.#setRunning(false);
    this.turns = [];
    this.log.replaceChildren();
    this.strip.show([]);
    byId("empty").hidden = false;
    say("New conversation.");
    this.input.focus();
  }

  #fitInput() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight + 2, 200)}px`;
  }

  #redraw() {
    byId("legend").hidden = !showsTokens();
    for (const turn of this.turns) turn.view?.draw();
  }

  #submit() {
    const content = this.input.value.trim();
    if (!content || this.abort) return;
    this.input.value = "";
    this.#fitInput();
    this.turns.push({ role: "user", content });
    const text = element("div", { class: "text" }, content);
    const head = element("h2", { class: "who" }, "You");
    this.log.append(element("article", { class: "message user" }, head, text));
    this.#answer();
  }

  /** Return the conversation as the API's messages. */
  #messages() {
    const found = systemMessages();
    for (const { role, content, answer } of this.turns) {
      if (role === "user") found.push({ role, content });
      else if (answer.content || answer.calls.length) found.push(...answerMessages(answer));
      else if (found.at(-1)?.role === "user") found.pop(); // it got no answer
    }
    return found;
  }

  async #answer() {
    byId("empty").hidden = true;
    for (const turn of this.turns) turn.view?.setLast(false);
    const messages = this.#messages();
    const answer = new Answer();
    const view = new AnswerView(answer, {
      regenerate: () => this.#regenerate(),
      resultsGiven: () => this.#answer(),
    });
    this.turns.push({ role: "assistant", answer, view });
    this.log.append(view.node);
    this.sticks = true;
    const abort = new AbortController();
    this.abort = abort;
    this.#setRunning(true);
    say("Answering.");
    await answer.run(
      async () => ({ ...(await baseRequest()), messages }),
      abort.signal,
      () => {
        if (this.abort !== abort) return; // the conversation was cleared
        view.draw();
        this.#follow();
        this.strip.show(answer.rounds);
        sayProgress(answer);
      },
    );
    if (this.abort !== abort) return;
    this.abort = null;
    this.#setRunning(false);
  }

  #regenerate() {
    if (this.abort) return;
    const last = this.turns.pop();
    last.view.node.remove();
    this.#answer();
  }

  #setRunning(running) {
    const before = document.activeElement;
    this.send.hidden = running;
    this.stop.hidden = !running;
    // The button that had the focus may be gone.
    const gone = [document.body, this.send, this.stop].includes(before);
    if (gone) (running ? this.stop : this.input).focus();
  }

  /** Scroll to the end in the next frame, after views have drawn. */
  #follow() {
    if (this.sticks) requestAnimationFrame(() => (this.box.scrollTop = this.box.scrollHeight));
  }
}

/** Return the messages of an answer and of its tool results. */
function answerMessages(answer) {
  const message = { role: "assistant", content: answer.content || null };
  if (answer.reasoning) message.reasoning_content = answer.reasoning;
  if (!answer.calls.length) return [message];
  message.tool_calls = answer.calls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  const results = answer.calls.map((call) => ({
    role: "tool",
    tool_call_id: call.id,
    content: call.result ?? "The user gave no result.",
  }));
  return [message, ...results];
}
