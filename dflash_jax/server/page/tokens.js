// The token view of an answer: every token marked by its source, every round with its cut.

import { byId, count, duration, element } from "./dom.js";

const SOURCES = { drafted: "drafted", target: "target", forced: "forced" };

function quoted(token) {
  return `“${token.text || `token ${token.id}`}”`;
}

/** Describe a round in words, for the card next to it and for screen readers. */
function describe(round, number) {
  const cut = round.proposed - round.accepted;
  const parts = [
    `Round ${number}: ${count(round.proposed, "draft")}, ${round.accepted} accepted`,
    duration(round.ms / 1000),
  ];
  if (round.rejected.length) parts.push(`rejected: ${round.rejected.map(quoted).join(" ")}`);
  else if (cut > 0) parts.push(unreported(cut));
  return `${parts.join(", ")}.`;
}

/** Say that drafts are not known: the output ended before them, or the plan does not report drafts. */
function unreported(cut) {
  return `the other ${count(cut, "draft")} not reported`;
}

function tokenNode(token) {
  const kind = SOURCES[token.source] ?? "target";
  const broken = token.text.includes("\n") ? " line-end" : "";
  return element("span", { class: `token ${kind}${broken}` }, token.text);
}

/**
 * The card with the details of a round, one for the whole page. The button of the round has the same
 * words for screen readers, so the card is hidden from them.
 */
class RoundCard {
  constructor() {
    this.node = element("div", { class: "round-card", hidden: true, "aria-hidden": "true" });
    document.body.append(this.node);
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.hide();
    });
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
  }

  show(button, round, number) {
    const rejected = round.rejected.map((token) =>
      element("del", { class: "token rejected" }, token.text || `token ${token.id}`),
    );
    const cut = round.proposed - round.accepted;
    const words = `: ${round.accepted} of ${count(round.proposed, "draft")} accepted, `;
    this.node.replaceChildren(
      element("strong", {}, `Round ${number}`),
      words,
      duration(round.ms / 1000),
    );
    if (cut > 0) {
      const found = rejected.length ? ["Rejected: ", ...rejected] : [unreported(cut)];
      this.node.append(element("div", {}, ...found));
    }
    this.node.hidden = false;
    const place = button.getBoundingClientRect();
    const own = this.node.getBoundingClientRect();
    const room = document.documentElement.clientWidth - own.width - 8;
    const above = place.top - own.height - 6;
    this.node.style.left = `${Math.max(8, Math.min(place.left - 12, room))}px`;
    const least = byId("scroll").getBoundingClientRect().top;
    this.node.style.top = `${above > least ? above : place.bottom + 6}px`;
  }

  hide() {
    this.node.hidden = true;
  }
}

let card = null;

/** Shows the rounds of one answer; `node` is the element. */
export class TokenView {
  constructor() {
    card ??= new RoundCard();
    this.node = element("div", {
      class: "tokens",
      role: "group",
      "aria-label": "Tokens by source. Arrow keys move from round to round.",
    });
    this.node.addEventListener("keydown", (event) => this.#move(event));
    this.count = 0;
    this.buttons = [];
  }

  /** Append the rounds that are not shown yet. */
  update(rounds) {
    while (this.count < rounds.length) this.#append(rounds[this.count]);
  }

  #append(round) {
    this.count += 1;
    const number = this.count;
    const node = element("span", { class: "round" });
    const button = round.proposed > 0 ? this.#button(round, number) : null;
    let placed = false;
    for (const token of round.tokens) {
      if (button && !placed && token.source !== "drafted") {
        node.append(button, ...this.#rejected(round));
        placed = true;
      }
      node.append(tokenNode(token));
    }
    if (button && !placed) node.append(button, ...this.#rejected(round));
    if (button) {
      node.addEventListener("mouseenter", () => card.show(button, round, number));
      node.addEventListener("mouseleave", () => card.hide());
      node.addEventListener("click", () => button.focus());
    }
    this.node.append(node);
  }

  #button(round, number) {
    const cut = round.accepted < round.proposed;
    const button = element(
      "button",
      {
        type: "button",
        class: cut ? "cut" : "cut whole",
        tabindex: this.buttons.length ? "-1" : "0",
        onfocus: () => {
          for (const each of this.buttons) each.tabIndex = each === button ? 0 : -1;
          card.show(button, round, number);
        },
        onblur: () => card.hide(),
      },
      element("span", { class: "hidden" }, describe(round, number)),
    );
    this.buttons.push(button);
    return button;
  }

  /** Return the rejected drafts as text that the box "rejected drafts" of the legend shows. */
  #rejected(round) {
    return round.rejected.map((token) =>
      element("del", { class: "token rejected inline", "aria-hidden": "true" }, token.text),
    );
  }

  #move(event) {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const at = this.buttons.indexOf(event.target);
    if (at < 0) return;
    const ends = { Home: 0, End: this.buttons.length - 1 };
    const to = ends[event.key] ?? (event.key in steps ? at + steps[event.key] : null);
    if (to === null) return;
    event.preventDefault();
    this.buttons[Math.max(0, Math.min(to, this.buttons.length - 1))].focus();
  }
}

/** Connect the legend's box that shows rejected drafts in the text. */
export function setUpLegend() {
  const box = byId("show-rejected");
  const apply = () => document.body.classList.toggle("show-rejected", box.checked);
  box.addEventListener("change", apply);
  apply();
}
