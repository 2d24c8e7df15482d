// The strip above the message box: tokens per round as bars, tokens per second as a line.

import { summary } from "./answer.js";
import { byId, count, figure, perFrame, svg } from "./dom.js";

const WINDOW = 8; // rounds over which the speed is averaged
const WIDTH = 7; // pixels of a bar and its gap
const HEIGHT = 40; // pixels

/** Return the speed after each round in tokens per second, averaged over the last rounds. */
function speeds(rounds) {
  return rounds.map((_, i) => {
    const part = rounds.slice(Math.max(0, i - WINDOW + 1), i + 1);
    const ms = part.reduce((sum, round) => sum + round.ms, 0);
    const tokens = part.reduce((sum, round) => sum + round.tokens.length, 0);
    return ms > 0 ? (tokens / ms) * 1000 : 0;
  });
}

/** Return the figures of an answer's rounds as a sentence. */
export function inWords(rounds) {
  const found = summary(rounds);
  const parts = [];
  if (found.length !== null) {
    const share = Math.round(found.accepted * 100);
    parts.push(
      `on average ${figure(found.length)} tokens per round (bars), ${share} % of drafts accepted`,
    );
  } else if (found.tokens > 1) {
    parts.push("no drafts, one token per step");
  }
  if (found.speed !== null) parts.push(`${figure(found.speed)} tokens per second (line)`);
  const text = parts.join("; ");
  return text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
}

/** Draws the rounds of the latest answer. */
export class Strip {
  constructor() {
    this.chart = byId("strip-chart");
    this.words = byId("strip-words");
    this.node = byId("strip");
    this.rounds = [];
    this.draw = perFrame(() => this.#draw());
  }

  /** Show the rounds of an answer, which may grow until the next call. */
  show(rounds) {
    this.rounds = rounds;
    this.draw();
  }

  #draw() {
    const words = inWords(this.rounds);
    this.node.hidden = !this.rounds.length;
    if (this.words.textContent !== words) this.words.textContent = words;
    const after = this.rounds.slice(1);
    const room = Math.max(1, Math.floor(this.node.clientWidth / WIDTH)); // older rounds leave
    const shown = after.slice(-room);
    const most = Math.max(
      1,
      ...shown.map((round) => Math.max(round.proposed + 1, round.tokens.length)),
    );
    const bar = (i, tokens, kind) => {
      const height = (tokens / most) * HEIGHT;
      const place = { x: i * WIDTH, y: HEIGHT - height, width: WIDTH - 1.5, height };
      return svg("rect", { class: kind, ...place });
    };
    const bars = shown.flatMap((round, i) => {
      const own = round.tokens.filter((token) => token.source !== "drafted").length;
      return [
        round.proposed ? bar(i, round.proposed + 1, "bar-proposed") : null,
        bar(i, round.tokens.length, own === round.tokens.length ? "bar-target" : "bar-accepted"),
      ].filter(Boolean);
    });
    const rates = speeds(after.slice(-room - WINDOW)).slice(-room);
    const top = Math.max(1, ...rates);
    const points = rates.map((rate, i) => {
      const y = HEIGHT - (rate / top) * (HEIGHT - 4);
      return `${(i + 0.5) * WIDTH},${y.toFixed(1)}`;
    });
    this.chart.setAttribute("width", shown.length * WIDTH);
    this.chart.setAttribute(
      "aria-label",
      `Tokens of each of ${count(this.rounds.length, "round")}, and speed. ${words}`,
    );
    const line =
      points.length > 1 ? svg("polyline", { class: "speed", points: points.join(" ") }) : "";
    this.chart.replaceChildren(...bars, line);
  }
}
