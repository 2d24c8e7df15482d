// Building DOM nodes. Text is only ever set as text, never parsed as HTML.

const SVG = "http://www.w3.org/2000/svg"; // a name, never fetched

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      node.addEventListener(name.replace(/^on/, ""), value);
    } else if (value === true) {
      node.setAttribute(name, "");
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/**
 * Return an HTML element.
 * @param {string} tag
 * @param {object} attributes  functions become event listeners, true an empty attribute; false, null
 *   and undefined are left out
 * @param {...(Node|string|null)} children
 */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Return an SVG element; arguments as those of `element`. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Return the element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Return a count with its noun: "1 token", "2 tokens". */
export function count(n, noun) {
  return `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
}

/** Return a number with three or more significant digits. */
export function figure(x) {
  return x >= 100 ? Math.round(x).toLocaleString("en") : x.toFixed(x >= 10 ? 1 : 2);
}

/** Return a duration in seconds as text. */
export function duration(seconds) {
  return seconds < 1 ? `${figure(seconds * 1000)} ms` : `${figure(seconds)} s`;
}

/** Return a size in bytes as text, in powers of 1024. */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = bytes > 0 ? Math.min(Math.floor(Math.log2(bytes) / 10), 4) : 0;
  return `${power ? figure(bytes / 1024 ** power) : bytes} ${units[power]}`;
}

/** Call `draw` in the next frame, once however often the returned function is called before. */
export function perFrame(draw) {
  let queued = false;
  return () => {
    if (queued) return;
    queued = true;
    // A hidden tab has no frames, but its streams go on.
    const later = document.hidden ? (run) => setTimeout(run, 100) : requestAnimationFrame;
    later(() => {
      queued = false;
      draw();
    });
  };
}
