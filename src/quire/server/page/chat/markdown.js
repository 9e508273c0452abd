// Markdown as elements. The parser gives tokens, each of which becomes an element of the table below or a text node:
// text of the model is never read as HTML. Links lead to http and https only, and show where.

import { copyButton, make } from "../base/elements.js";
import { paint } from "./code.js";
import { drawMaths, maths } from "./maths.js";

// A line break in the cells of tables can only be written so.
function lineBreak(state, isSilent) {
  const found = /^<br\s*\/?>/i.exec(state.src.slice(state.pos, state.pos + 8));
  if (!found) return false;
  if (!isSilent) state.push("hardbreak", "br", 0);
  state.pos += found[0].length;
  return true;
}

const parser = globalThis.markdownit({ html: false, linkify: true, breaks: true }).use(maths);
parser.inline.ruler.before("html_inline", "line_break", lineBreak);
parser.validateLink = (address) => /^https?:\/\/[^/]/i.test(address);
// Names of files look like names of hosts.
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });

const PLAIN = new Set(["p", "ul", "ol", "li", "blockquote", "thead", "tbody", "tr", "th", "td", "strong", "em", "s"]);
const MAX_ADDRESS = 60;

const link = (address) =>
  make("a", { href: address, target: "_blank", rel: "noreferrer noopener nofollow", title: address });

// Behind a link whose text is not its address, the address: a text can name another host than the one it leads to.
function addressBehind(element) {
  const address = element.href,
    shown = address.length > MAX_ADDRESS ? `${address.slice(0, MAX_ADDRESS)}\u2026` : address;
  const isSame = [address, element.getAttribute("href")].some(
    (each) => each.replace(/\/$/, "") === element.textContent.replace(/\/$/, ""),
  );
  return isSame ? [] : [make("span", { className: "address", textContent: ` (${shown})` })];
}

function openTag(token) {
  const { tag } = token,
    level = /^h([1-6])$/.exec(tag);
  // The page has two levels of headings of its own.
  if (level) return make(`h${Math.min(6, Number(level[1]) + 2)}`);
  if (token.type === "link_open") return link(token.attrGet("href") ?? "");
  if (tag === "table") return make("table");
  if (!PLAIN.has(tag)) return null;
  const element = make(tag),
    start = tag === "ol" && token.attrGet("start");
  if (start) element.start = Number(start);
  const aligned = /text-align:(left|center|right)/.exec(token.attrGet("style") ?? "");
  if (aligned) element.style.textAlign = aligned[1];
  return element;
}

function code(token) {
  const text = token.content.replace(/\n$/, ""),
    language = (token.info ?? "").trim().split(/\s+/)[0].slice(0, 30);
  const head = make(
    "div",
    { className: "code-head" },
    make("span", { textContent: language }),
    copyButton("this code", () => text),
  );
  return make(
    "div",
    { className: "code" },
    head,
    make("pre", { tabIndex: 0 }, make("code", {}, ...paint(text, language))),
  );
}

function leaf(token) {
  switch (token.type) {
    case "fence":
    case "code_block":
      return code(token);
    case "code_inline":
      return make("code", { textContent: token.content });
    case "softbreak":
    case "hardbreak":
      return make("br");
    case "hr":
      return make("hr");
    case "maths":
      return drawMaths(token.content, token.meta.isDisplay);
    // A picture would be loaded from another host: it is a link to it, if to anything.
    case "image":
      return picture(token);
    default:
      return document.createTextNode(token.content);
  }
}

function picture(token) {
  const element = link(token.attrGet("src") ?? "");
  element.textContent = token.content || "picture";
  return make("span", {}, element, ...addressBehind(element));
}

// Where an item begins with "[ ]" or "[x]", a box that shows it.
function markTask(item, token) {
  const first = token.children?.[0],
    found = first?.type === "text" && /^\[([ xX])\]\s+/.exec(first.content);
  if (!found) return;
  first.content = first.content.slice(found[0].length);
  const box = make("input", { type: "checkbox", disabled: true, checked: found[1] !== " " });
  box.setAttribute("aria-label", box.checked ? "done" : "to do");
  item.classList.add("task");
  item.prepend(box);
}

function build(tokens, root) {
  const open = [root];
  for (const token of tokens) {
    const parent = open.at(-1);
    if (token.type === "inline") {
      const item = parent.tagName === "LI" ? parent : parent.parentElement;
      if (item?.tagName === "LI" && !item.textContent) markTask(item, token);
      build(token.children ?? [], parent);
    } else if (token.nesting > 0) {
      // The paragraphs of tight lists are hidden: their text belongs to the item.
      const element = token.hidden ? parent : (openTag(token) ?? parent);
      if (element !== parent)
        parent.append(token.tag === "table" ? make("div", { className: "scroll", tabIndex: 0 }, element) : element);
      open.push(element);
    } else if (token.nesting < 0) {
      const element = open.pop();
      if (token.type === "link_close") open.at(-1).append(...addressBehind(element));
    } else parent.append(leaf(token));
  }
  return root;
}

// The tokens of each block of the outermost level.
function blocksOf(tokens) {
  const blocks = [];
  let depth = 0;
  for (const token of tokens) {
    if (!depth) blocks.push([]);
    blocks.at(-1).push(token);
    depth += token.nesting;
  }
  return blocks;
}

// Shows a text, which may end anywhere, in an element. Blocks that it showed before stay the same elements, so that a
// selection, a focus and the place in a wide table outlive the pieces of a stream.
export function show(element, text) {
  const lines = text.split("\n"),
    before = element.shownBlocks ?? [];
  const tokens = parser.parse(text, {});
  element.shownBlocks = blocksOf(tokens).map((block, at) => {
    const [from, to] = block[0].map,
      source = lines.slice(from, to).join("\n"),
      known = before[at];
    if (known?.source === source && known.type === block[0].type && known.node.parentNode === element) return known;
    const node = build(block, document.createDocumentFragment()).firstChild;
    return { source, type: block[0].type, node };
  });
  const nodes = element.shownBlocks.map(({ node }) => node).filter(Boolean);
  nodes.forEach((node, at) => {
    if (element.childNodes[at] !== node) element.insertBefore(node, element.childNodes[at] ?? null);
  });
  while (element.childNodes.length > nodes.length) element.lastChild.remove();
}
