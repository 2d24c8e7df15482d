// One streamed answer: its text, tool calls, rounds and statistics as they arrive.

import { streamChat } from "./api.js";

/** The state of an answer. Views read it after each call of `onChange`. */
export class Answer {
  constructor() {
    this.content = "";
    this.reasoning = "";
    this.calls = []; // {id, name, arguments, result}
    this.rounds = []; // see docs/serving.md, `return_token_sources`
    this.ids = null; // token ids, once the answer is complete
    this.finish = null; // the server's finish reason
    this.timings = null; // llama.cpp's `timings`
    this.usage = null;
    this.warnings = [];
    this.note = ""; // what the server does before the first token
    this.error = null;
    this.stopped = false;
    this.running = false;
    this.started = 0; // milliseconds of performance.now()
    this.ended = 0;
  }

  /** Whether anything of the answer can be shown or continued. */
  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length && !this.rounds.length;
  }

  /** Return the number of output tokens that are known so far. */
  get tokens() {
    const counted = this.rounds.reduce((sum, round) => sum + round.tokens.length, 0);
    return this.timings?.predicted_n ?? this.usage?.completion_tokens ?? counted;
  }

  /**
   * Send a request and read its stream to the end. Errors are kept in `error`.
   * @param {() => Promise<object>} prepare  returns the body of a chat completion, without `stream`
   * @param {AbortSignal} signal  stops the answer
   * @param {() => void} onChange  called after each change
   */
  async run(prepare, signal, onChange) {
    this.running = true;
    this.started = performance.now();
    onChange();
    const options = { stream: true, stream_options: { include_usage: true } };
    try {
      const body = { ...(await prepare()), ...options };
      for await (const event of streamChat(body, signal)) {
        if (event.comment !== undefined) this.note = this.isEmpty ? progressOf(event.comment) : "";
        else this.#take(event.chunk);
        onChange();
      }
    } catch (error) {
      if (signal.aborted) this.stopped = true;
      else this.error = error;
    } finally {
      this.running = false;
      this.note = "";
      this.ended = performance.now();
      onChange();
    }
  }

  #take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    this.timings = chunk.timings ?? this.timings;
    this.warnings = chunk.warnings ?? this.warnings;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    for (const part of delta.tool_calls ?? []) {
      const at = part.index ?? this.calls.length;
      this.calls[at] ??= { id: "", name: "", arguments: "", result: null };
      const call = this.calls[at];
      call.id = part.id ?? call.id;
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    this.rounds.push(...(choice.rounds ?? []));
    this.finish = choice.finish_reason ?? this.finish;
    this.ids = choice.token_ids ?? this.ids;
  }
}

/** Return the comment of a waiting stream in words; "keepalive 64/128" counts prompt tokens. */
function progressOf(comment) {
  const found = /^keepalive (\d+)\/(\d+)$/.exec(comment);
  return found ? `Reading the prompt: ${found[1]} of ${found[2]} tokens` : comment;
}

/**
 * Return figures of rounds: of all, and of those with drafts.
 *
 * `speed` is the tokens after the first one per second of decoding, `length` the mean number of
 * tokens per draft-verify round; both are null before they are known.
 */
export function summary(rounds) {
  const drafting = rounds.filter((round) => round.proposed > 0);
  const after = rounds.slice(1); // the first round is the prompt's
  const sum = (list, value) => list.reduce((total, each) => total + value(each), 0);
  const seconds = sum(after, (round) => round.ms) / 1000;
  const proposed = sum(drafting, (round) => round.proposed);
  const committed = sum(drafting, (round) => round.tokens.length);
  return {
    rounds: drafting.length,
    tokens: sum(rounds, (round) => round.tokens.length),
    length: drafting.length ? committed / drafting.length : null,
    accepted: proposed ? sum(drafting, (round) => round.accepted) / proposed : null,
    speed: seconds > 0 ? sum(after, (round) => round.tokens.length) / seconds : null,
  };
}
