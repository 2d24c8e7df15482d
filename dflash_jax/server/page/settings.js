// The settings panel. All but the API key are forgotten when the page is closed.

import { apiKey, setApiKey } from "./api.js";
import { byId, element } from "./dom.js";
import { knowsField, properties } from "./monitor.js";

const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** Connect the fields of the panel. */
export function setUpSettings() {
  const key = byId("api-key");
  key.value = apiKey();
  key.addEventListener("change", () => {
    setApiKey(key.value.trim());
    window.dispatchEvent(new Event("api-key"));
  });
  byId("example-tools").addEventListener("click", () => {
    byId("tools").value = JSON.stringify(EXAMPLE, null, 2);
  });
  // The panel is next to the conversation where there is room, above it elsewhere.
  const wide = window.matchMedia("(min-width: 60rem)");
  const fit = () => (byId("settings").open = wide.matches);
  wide.addEventListener("change", fit);
  fit();
}

/** Offer the server's models, and keep the chosen one. */
export function showModels(names) {
  const select = byId("model");
  const chosen = select.value;
  if (names.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
    select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  }
  if (names.includes(chosen)) select.value = chosen;
}

/** Return the system prompt as a list of messages, empty without one. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

function number(id, name) {
  const field = byId(id);
  if (!field.checkValidity()) throw new Error(`${name}: ${field.validationMessage}`);
  return field.value.trim() === "" ? null : Number(field.value);
}

function tools() {
  const text = byId("tools").value.trim();
  if (!text) return null;
  try {
    const found = JSON.parse(text);
    return Array.isArray(found) ? found : [found];
  } catch (error) {
    throw new Error(`The tools in the settings are not JSON: ${error.message}`);
  }
}

/**
 * Return the request fields that the settings determine.
 * @throws {Error} a field of the settings is not valid
 */
export async function baseRequest() {
  const body = { timings_per_token: true };
  const temperature = number("temperature", "Temperature");
  const most = number("max-tokens", "Max tokens");
  const given = tools();
  if (temperature !== null) body.temperature = temperature;
  if (most !== null) body.max_tokens = most;
  if (given) body.tools = given;
  await properties();
  if (byId("model").value) body.model = byId("model").value;
  if (knowsField("return_token_sources")) body.return_token_sources = true;
  return body;
}
