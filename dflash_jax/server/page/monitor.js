// Watches the server: whether it answers, is ready, and what it reports about itself.

import { ServerError, getJson, getText } from "./api.js";

const POLL = 2000; // milliseconds between two looks
const RETRY = [300, 600, 1000, 2000, 3000]; // while the server does not answer
const CHAT = "/v1/chat/completions";

let known = null; // the last answer of /props

/** Return the server's properties, asking for them if they are not known; null if it refuses. */
export async function properties() {
  if (known === null) known = await getJson("props").catch(() => null);
  return known;
}

/** Whether chat completions have a request field; true if the server's fields are not known. */
export function knowsField(name) {
  return known?.parameters?.[CHAT]?.includes(name) ?? true;
}

/**
 * Asks for the server's state again and again.
 *
 * States: "connecting" before the first answer, "ready", "starting" (models load or compile; `words`
 * are the server's), "refused" (the API key), "failed" (the engine), "offline".
 */
export class Monitor {
  /**
   * @param {() => boolean} wantsDetails  whether metrics are on screen
   * @param {(monitor: Monitor) => void} onChange  called after each look
   */
  constructor(wantsDetails, onChange) {
    this.wantsDetails = wantsDetails;
    this.onChange = onChange;
    this.state = "connecting";
    this.words = "";
    this.models = [];
    this.props = null;
    this.metrics = null; // Prometheus text
    this.failures = 0;
    this.timer = 0;
    this.looking = false;
    this.stale = false; // the key changed during a look
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.look();
    });
    window.addEventListener("online", () => this.look());
    window.addEventListener("api-key", () => {
      this.stale = this.looking;
      this.#forget();
      this.look();
    });
  }

  /** Look now, and from then on at intervals while the page is visible. */
  async look() {
    if (this.looking) return;
    this.looking = true;
    clearTimeout(this.timer);
    await this.#ask();
    this.looking = false;
    if (this.stale) {
      this.stale = false;
      this.#forget();
    }
    this.onChange(this);
    const pause =
      this.state === "offline" ? RETRY[Math.min(this.failures, RETRY.length) - 1] : POLL;
    if (!document.hidden) this.timer = setTimeout(() => this.look(), pause);
  }

  /** Begin as if nothing was known, since a new key may be right. */
  #forget() {
    known = this.props = null;
    this.state = "connecting";
  }

  async #ask() {
    try {
      await this.#askState();
      if (this.state === "refused") return;
      // Short, and needs the key: so a key that is no longer accepted is noticed.
      this.models = (await getJson("v1/models")).data.map((model) => model.id);
      if (this.props === null || this.state !== "ready" || this.wantsDetails()) {
        known = this.props = await getJson("props");
      }
      if (this.wantsDetails()) this.metrics = await getText("metrics");
    } catch (error) {
      if (!(error instanceof ServerError)) this.#lost();
      else if (error.status === 401) [this.state, this.words] = ["refused", error.message];
      else this.words = error.message;
    }
  }

  async #askState() {
    try {
      await getJson("ready", 5000);
      // A refused key is not tried again; the user has to change it.
      if (this.state !== "refused") this.state = "ready";
      this.words = this.state === "refused" ? this.words : "";
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      if (this.state !== "refused") this.state = error.status === 503 ? "starting" : "failed";
      this.words = error.message;
    }
    this.failures = 0;
  }

  #lost() {
    this.failures += 1;
    this.state = "offline";
    this.words = "The server cannot be reached. Trying again until it answers.";
    this.props = this.metrics = null; // another server may come back
    known = null;
  }
}

/** Return samples of Prometheus' text format: a list of {labels, value} for each name. */
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^(?:dflash_jax:)?([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:\\.|[^"\\])*)"/g)) {
      labels[name] = value;
    }
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return found;
}
