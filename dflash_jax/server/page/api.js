// Requests to the server that sent this page: JSON, text, and streams of chat completions.

const KEY = "dflash-jax-api-key"; // in sessionStorage, which ends with the tab
const LONGEST_WORDS = 600; // characters of an error that a proxy wrote

/** An error response, or an error event of a stream, with the server's own words. */
export class ServerError extends Error {
  constructor(message, { status = 0, code = null, retry = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retry = retry; // seconds of Retry-After
  }
}

/** No answer: the server is gone, or the connection broke. */
export class Unreachable extends Error {}

/** Return the API key of this tab; empty if there is none. */
export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

/** Keep the API key until the tab is closed; an empty one is forgotten. */
export function setApiKey(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
}

/**
 * Return the message of an error body: OpenAI's and Anthropic's error object, an error that is a
 * text, `message`, or `detail` as text or as a list of objects with `msg`. Null if it has none.
 */
export function wordsOf(body) {
  if (typeof body === "string") return body.trim() || null;
  if (body === null || typeof body !== "object") return null;
  if (Array.isArray(body)) {
    const found = body.map((each) => wordsOf(each) ?? wordsOf(each?.msg)).filter(Boolean);
    return found.length ? found.join("; ") : null;
  }
  for (const name of ["error", "message", "detail", "msg"]) {
    const found = wordsOf(body[name]);
    if (found) return found;
  }
  return null;
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let words = null;
  let code = null;
  try {
    const body = JSON.parse(text);
    words = wordsOf(body);
    code = body?.error?.code ?? null;
  } catch {
    // A proxy's page: only its text, which is parsed without running or loading anything.
    const page = new DOMParser().parseFromString(text, "text/html");
    words = page.body.textContent.trim().replace(/\s+/g, " ").slice(0, LONGEST_WORDS);
  }
  const status = `${response.status} ${response.statusText}`.trim();
  const retry = Number(response.headers.get("retry-after")) || null;
  return new ServerError(words || `The server answered ${status} without a message.`, {
    status: response.status,
    code,
    retry,
  });
}

/**
 * Return a successful response.
 * @throws {ServerError} the status is 4xx or 5xx
 * @throws {Unreachable} there is no answer
 */
async function request(path, { body, signal, timeout } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (apiKey()) headers["Authorization"] = `Bearer ${apiKey()}`;
  const options = { headers, signal: timeout ? AbortSignal.timeout(timeout) : signal };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Unreachable("The server cannot be reached.");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Return the JSON value at a path of the server. */
export async function getJson(path, timeout = 10000) {
  return (await request(path, { timeout })).json();
}

/** Return the text at a path of the server. */
export async function getText(path, timeout = 10000) {
  return (await request(path, { timeout })).text();
}

/** Yield the lines of a response, without their ends. */
async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      for (const part of parts) yield part.endsWith("\r") ? part.slice(0, -1) : part;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Yield the events of a streamed chat completion: `{chunk}` for data, `{comment}` for comments.
 * @param {object} body  of the request
 * @param {AbortSignal} signal  aborts the request
 * @throws {ServerError} the request was refused, or the stream has an error event
 * @throws {Unreachable} there was no answer, or the stream broke off
 */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", { body, signal });
  let data = [];
  try {
    for await (const line of lines(response)) {
      if (line.startsWith(":")) {
        yield { comment: line.slice(1).trim() };
      } else if (line.startsWith("data:")) {
        data.push(line.slice(5).replace(/^ /, ""));
      } else if (line === "" && data.length) {
        const text = data.join("\n");
        data = [];
        if (text === "[DONE]") return;
        const chunk = JSON.parse(text);
        if (chunk.error) {
          throw new ServerError(wordsOf(chunk) ?? "The stream ended with an error.", {
            code: chunk.error.code ?? null,
          });
        }
        yield { chunk };
      }
    }
  } catch (error) {
    if (error instanceof ServerError || signal?.aborted) throw error;
    if (error instanceof SyntaxError)
      throw new ServerError(`The stream is not valid: ${error.message}`);
    throw new Unreachable("The connection to the server was lost before the answer was complete.");
  }
  throw new Unreachable("The stream ended before the answer was complete.");
}
