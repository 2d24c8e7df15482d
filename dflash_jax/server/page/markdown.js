// A small Markdown renderer. It makes elements and text nodes; HTML in its input stays text.
//
// Blocks: headings, paragraphs, fenced code, lists, quotes, tables, rules. Inline: code, emphasis,
// strikethrough, links. All else is text. Unfinished input, such as an open code fence, renders as
// far as it goes.

import { element } from "./dom.js";

const DEEPEST = 16; // levels of nested blocks or emphasis; text beyond that stays as it is
// No pattern has two adjacent repetitions that match the same characters: time would be quadratic.
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)|\s*$| )/;
const QUOTE = /^ {0,3}> ?/;
const DELIMITER = /^:?-+:?$/;
const LINK =
  /\[((?:\\.|[^[\]\\])*)\]\(\s{0,9}<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s{1,9}"[^"]*")?\s{0,9}\)/y;
const LONGEST_ADDRESS = 2048; // characters; each place where one may start is read as far
const ADDRESS = /https?:\/\/[^\s<>"'`|]{1,2048}/y;
const AFTER_ADDRESS = ".,;:!?)]*_~"; // not part of an address at its end
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}_]/u;

/** Return a fragment with the rendered text. */
export function render(text) {
  const fragment = document.createDocumentFragment();
  blocks(fragment, text.replace(/\r\n?/g, "\n").replaceAll("\t", "    ").split("\n"), 0);
  return fragment;
}

function blocks(parent, lines, depth) {
  if (depth > DEEPEST) {
    parent.append(element("p", {}, lines.join("\n")));
    return;
  }
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at += 1;
    else if (FENCE.test(line)) at = code(parent, lines, at);
    else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      // Headings of an answer are below those of the page.
      const heading = element(`h${Math.min(marks.length + 2, 6)}`, {
        class: `level-${marks.length}`,
      });
      inline(heading, withoutClosing(title.trim()), 0);
      parent.append(heading);
      at += 1;
    } else if (RULE.test(line)) {
      parent.append(element("hr"));
      at += 1;
    } else if (QUOTE.test(line)) at = quote(parent, lines, at, depth);
    else if (ITEM.test(line)) at = list(parent, lines, at, depth);
    else if (startsTable(lines, at)) at = table(parent, lines, at);
    else at = paragraph(parent, lines, at);
  }
}

/** Return a heading without the marks that may close it. */
function withoutClosing(title) {
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return end && /\s/.test(title[end - 1]) ? title.slice(0, end).trimEnd() : title;
}

function startsTable(lines, at) {
  const next = lines[at + 1];
  if (!lines[at].includes("|") || !/^ {0,3}[|:-]/.test(next ?? "")) return false;
  const sides = cells(next);
  const delimits = sides.every((side) => DELIMITER.test(side));
  return delimits && cells(lines[at]).length === sides.length;
}

function startsBlock(lines, at) {
  const line = lines[at];
  if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
  return QUOTE.test(line) || ITEM.test(line) || startsTable(lines, at);
}

function paragraph(parent, lines, at) {
  const start = at;
  do at += 1;
  while (at < lines.length && !startsBlock(lines, at));
  const node = element("p");
  lines.slice(start, at).forEach((line, i) => {
    if (i) node.append(element("br")); // models end lines on purpose
    inline(node, line.trim(), 0);
  });
  parent.append(node);
  return at;
}

function code(parent, lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const closing = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  const start = (at += 1);
  while (at < lines.length && !closing.test(lines[at])) at += 1;
  const text = lines.slice(start, at).join("\n");
  const name = language.trim().split(/\s/)[0];
  const label = name ? `${name} code` : "code"; // it scrolls, so it takes the keyboard's focus
  const block = { tabindex: "0", role: "group", "aria-label": label };
  parent.append(element("pre", block, element("code", {}, text)));
  return at + 1;
}

function quote(parent, lines, at, depth) {
  const inner = [];
  while (at < lines.length && QUOTE.test(lines[at])) inner.push(lines[at++].replace(QUOTE, ""));
  const node = element("blockquote");
  blocks(node, inner, depth + 1);
  parent.append(node);
  return at;
}

function list(parent, lines, at, depth) {
  const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.setAttribute("start", parseInt(ITEM.exec(lines[at])[2], 10));
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || RULE.test(lines[at]) || /\d/.test(found[2]) !== ordered) break;
    const indent = found[1].length + found[2].length + (found[3]?.length ?? 1);
    const inner = [lines[at].slice(found[0].length)];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const deeper = line.length - line.trimStart().length;
      const next = lines[at + 1] ?? "";
      // A blank line continues an item if an indented line follows it.
      const blank = !line.trim() && next.trim() && next.length - next.trimStart().length >= 2;
      const lazy = inner.at(-1).trim() && !startsBlock(lines, at);
      if (!blank && !(line.trim() && deeper >= Math.min(indent, 2)) && !lazy) break;
      inner.push(line.slice(Math.min(deeper, indent)));
      at += 1;
    }
    const item = element("li");
    blocks(item, inner, depth + 1);
    const only = item.children.length && item.firstElementChild.tagName === "P";
    if (only) item.firstElementChild.replaceWith(...item.firstElementChild.childNodes); // no margins
    node.append(item);
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  parent.append(node);
  return at;
}

function cells(line) {
  const inner = line
    .trim()
    .replace(/^\|/, "")
    .replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(parent, lines, at) {
  const sides = cells(lines[at + 1]).map((cell) => {
    if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
    return null;
  });
  const row = (line, tag) => {
    const node = element("tr");
    const found = cells(line).slice(0, sides.length);
    found.forEach((text, i) => {
      const cell = element(tag, { class: sides[i], scope: tag === "th" ? "col" : null });
      inline(cell, text, 0);
      node.append(cell);
    });
    const missing = sides.length - found.length; // one cell: rows may be many and short
    if (missing) node.append(element(tag, { colspan: missing }));
    return node;
  };
  const body = element("tbody");
  const head = element("thead", {}, row(lines[at], "th"));
  at += 2;
  while (at < lines.length && lines[at].includes("|")) body.append(row(lines[at++], "td"));
  const scroll = { class: "table", tabindex: "0", role: "group", "aria-label": "table" };
  parent.append(element("div", scroll, element("table", {}, head, body)));
  return at;
}

/** Return the address if it is a complete one of the web, else null. */
function webAddress(text) {
  try {
    const url = new URL(text);
    return ["http:", "https:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function anchor(address) {
  const safe = { rel: "noopener noreferrer", target: "_blank", referrerpolicy: "no-referrer" };
  return element("a", { href: address, ...safe });
}

/** Append a line's text to a node. Each delimiter is searched for once in vain, so time is linear. */
function inline(parent, text, depth) {
  const absent = new Set(); // delimiters without a closing one in the rest of the text
  let plain = "";
  const flush = () => {
    if (plain) parent.append(plain);
    plain = "";
  };
  const nest = (node, inner) => {
    flush();
    if (depth < DEEPEST) inline(node, inner, depth + 1);
    else node.append(inner);
    parent.append(node);
  };
  let at = 0;
  while (at < text.length) {
    const sign = text[at];
    if (sign === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (sign === "`") {
      const [run] = /^`+/.exec(text.slice(at, at + 100));
      const end = absent.has(run) ? -1 : closingTicks(text, run, at + run.length);
      if (end < 0) {
        absent.add(run);
        plain += run;
        at += run.length;
      } else {
        flush();
        parent.append(
          element("code", {}, text.slice(at + run.length, end).replace(/^ (.*) $/, "$1")),
        );
        at = end + run.length;
      }
      continue;
    }
    if (sign === "[" || (sign === "!" && text[at + 1] === "[")) {
      LINK.lastIndex = at + (sign === "!");
      const found = LINK.exec(text);
      const address = found && webAddress(found[2]);
      if (address) {
        nest(anchor(address), found[1] || address);
        at = LINK.lastIndex;
        continue;
      }
    }
    if (sign === "h" && !WORD.test(text[at - 1] ?? "")) {
      ADDRESS.lastIndex = at;
      const [found] = ADDRESS.exec(text) ?? [""];
      let end = found.length;
      while (AFTER_ADDRESS.includes(found[end - 1] ?? " ")) end -= 1;
      const bare = found.slice(0, end);
      if (bare && found.length < LONGEST_ADDRESS && webAddress(bare)) {
        flush();
        const node = anchor(webAddress(bare));
        node.append(bare);
        parent.append(node);
        at += bare.length;
        continue;
      }
    }
    if (sign === "*" || sign === "_" || sign === "~") {
      const found = emphasis(text, at, absent);
      if (found) {
        nest(element(found.tag), found.inner);
        at = found.end;
        continue;
      }
    }
    plain += sign;
    at += 1;
  }
  flush();
}

function closingTicks(text, run, from) {
  for (let at = text.indexOf(run, from); at >= 0;) {
    let end = at;
    while (text[end] === "`") end += 1;
    if (end - at === run.length) return at;
    at = text.indexOf(run, end);
  }
  return -1;
}

/** Return the emphasis that starts at a place of a text, or null. */
function emphasis(text, at, absent) {
  const sign = text[at];
  const double = text[at + 1] === sign;
  if (sign === "~" && !double) return null;
  const mark = double ? sign + sign : sign;
  const start = at + mark.length;
  if (absent.has(mark) || !/\S/.test(text[start] ?? "")) return null;
  if (sign === "_" && WORD.test(text[at - 1] ?? "")) return null;
  for (let end = text.indexOf(mark, start + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    const before = text[end - 1];
    let after = text[end + mark.length];
    if (!double && (after === sign || before === sign)) {
      while (text[end + 1] === sign) end += 1; // a double mark inside
      continue;
    }
    if (double && after === sign) {
      end += 1; // the last two of three close the outer one
      after = text[end + mark.length];
    }
    if (!/\S/.test(before) || before === "\\" || (sign === "_" && WORD.test(after ?? ""))) continue;
    const tag = sign === "~" ? "del" : double ? "strong" : "em";
    return { tag, inner: text.slice(start, end), end: end + mark.length };
  }
  absent.add(mark);
  return null;
}
