// Renders texts of standard input, a JSON list, with the page's Markdown and a stub of the DOM.
// Prints for each the number of elements and the tree, cut after 400 characters.
import { readFileSync } from "node:fs";

let elements = 0;
class Stub {
  constructor(tag) {
    this.tag = tag;
    this.attributes = {};
    this.childNodes = [];
    elements += 1;
  }
  get tagName() {
    return this.tag.toUpperCase();
  }
  get children() {
    return this.childNodes.filter((child) => child instanceof Stub);
  }
  get firstElementChild() {
    return this.children[0];
  }
  append(...nodes) {
    for (const node of nodes) {
      this.childNodes.push(node);
      if (node instanceof Stub) node.parent = this;
    }
  }
  replaceWith(...nodes) {
    const at = this.parent.childNodes.indexOf(this);
    this.parent.childNodes.splice(at, 1, ...nodes);
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  text(most) {
    const { href, colspan } = this.attributes;
    let out = `<${this.tag}${href ? ` href=${href}` : ""}${colspan ? ` colspan=${colspan}` : ""}>`;
    for (const child of this.childNodes) {
      if (out.length > most) break;
      out += child instanceof Stub ? child.text(most - out.length) : child;
    }
    return `${out}</${this.tag}>`;
  }
}

globalThis.document = {
  createDocumentFragment: () => new Stub("main"),
  createElement: (tag) => new Stub(tag),
};
const { render } = await import(process.argv[2]);
const found = JSON.parse(readFileSync(0, "utf8")).map((text) => {
  elements = 0;
  const tree = render(text).text(400).slice(0, 400);
  return { elements, tree };
});
console.log(JSON.stringify(found));
