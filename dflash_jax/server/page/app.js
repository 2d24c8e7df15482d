// Connects the parts of the page.

import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { byId, element } from "./dom.js";
import { Monitor } from "./monitor.js";
import { setUpSettings, showModels } from "./settings.js";
import { Status } from "./status.js";
import { Strip } from "./strip.js";
import { setUpLegend } from "./tokens.js";

const VIEWS = ["chat", "compare", "status"];
const EXAMPLES = [
  "What can you do for me?",
  "Tell me a story about a cat.",
  "Write a function that checks whether a number is prime.",
];

/** Show the view that the address names; other addresses, such as #main, keep the view. */
function showView() {
  const named = location.hash.slice(1) || "chat";
  const wanted = VIEWS.includes(named) ? named : document.body.dataset.view;
  document.body.dataset.view = wanted;
  for (const name of VIEWS) byId(`view-${name}`).hidden = name !== wanted;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${wanted}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  monitor.look();
}

setUpSettings();
setUpLegend();
new Chat(new Strip());
new Compare();
const status = new Status();
const monitor = new Monitor(
  () => document.body.dataset.view === "status",
  () => {
    status.showState(monitor);
    status.showDetails(monitor);
    showModels(monitor.models);
  },
);
for (const text of EXAMPLES) {
  const ask = () => {
    byId("message").value = text;
    byId("composer").requestSubmit();
  };
  byId("examples").append(element("button", { type: "button", onclick: ask }, text));
}
window.addEventListener("hashchange", showView);
showView();
byId("message").focus();
