// Announcements for screen readers: notices at once, streamed text a few sentences at a time.

import { count, byId } from "./dom.js";

const PAUSE = 4000; // milliseconds between two announcements of streamed text

let spoken = { answer: null, at: 0, time: 0 };

/** Announce a notice. */
export function say(text) {
  byId("announcer").textContent = text;
}

/** Announce the sentences of an answer that are complete and were not announced, now and then. */
export function sayProgress(answer) {
  if (spoken.answer !== answer) spoken = { answer, at: 0, time: performance.now() };
  const now = performance.now();
  if (answer.running && now - spoken.time < PAUSE) return;
  const rest = answer.content.slice(spoken.at);
  const end = answer.running
    ? Math.max(rest.lastIndexOf(". "), rest.lastIndexOf("\n")) + 1
    : rest.length;
  if (answer.running && end <= 0) return;
  spoken.at += end;
  spoken.time = now;
  const said = [rest.slice(0, end).trim()];
  const isWhole = !answer.running && !answer.error; // an error is an alert of its own
  if (isWhole) {
    said.push(answer.stopped ? "Stopped." : "Answer complete.");
    if (answer.calls.length) said.push(`${count(answer.calls.length, "tool call")}.`);
  }
  say(said.filter(Boolean).join(" "));
}
