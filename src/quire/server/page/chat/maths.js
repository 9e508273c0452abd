// LaTeX as MathML: where it stands in Markdown, and the elements of its tree, by an allow list.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_LENGTH = 5000,
  MAX_KEPT = 500;
const ELEMENTS = new Set([
  "math",
  "menclose",
  "mfrac",
  "mi",
  "mmultiscripts",
  "mn",
  "mo",
  "mover",
  "mpadded",
  "mphantom",
  "mprescripts",
  "mroot",
  "mrow",
  "mspace",
  "msqrt",
  "mstyle",
  "msub",
  "msubsup",
  "msup",
  "mtable",
  "mtd",
  "mtext",
  "mtr",
  "munder",
  "munderover",
  "none",
]);
const ATTRIBUTES = new Set([
  "accent",
  "accentunder",
  "columnalign",
  "depth",
  "display",
  "displaystyle",
  "fence",
  "form",
  "height",
  "largeop",
  "linebreak",
  "linethickness",
  "lspace",
  "mathbackground",
  "mathcolor",
  "mathsize",
  "mathvariant",
  "maxsize",
  "minsize",
  "movablelimits",
  "notation",
  "rowspacing",
  "rspace",
  "scriptlevel",
  "separator",
  "stretchy",
  "symmetric",
  "voffset",
  "width",
]);
const STYLES = new Set([
  "borderBottom",
  "borderLeft",
  "borderRight",
  "borderTop",
  "color",
  "fontStyle",
  "fontWeight",
  "math-depth",
  "mathDepth",
  "padding",
  "paddingBottom",
  "paddingLeft",
  "paddingRight",
  "paddingTop",
  "textAlign",
  "width",
]);
const kept = new Map();

// An element of a node of the library's tree, or null for what is not in the lists.
function build(node) {
  if (typeof node.text === "string") return document.createTextNode(node.text);
  const isListed = ELEMENTS.has(node.type);
  if (!isListed && node.type) return null;
  const element = isListed ? document.createElementNS(MATHML, node.type) : document.createDocumentFragment();
  if (isListed) {
    for (const [name, value] of Object.entries(node.attributes ?? {}))
      if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
    for (const [name, value] of Object.entries(node.style ?? {})) {
      if (STYLES.has(name) && !/url|[;\\]/i.test(value)) element.style[name] = value;
    }
    const classes = (node.classes ?? []).filter((name) => /^tml-[a-z-]+$|^math[a-z]+$/.test(name));
    if (classes.length) element.setAttribute("class", classes.join(" "));
  }
  element.append(...(node.children ?? []).map(build).filter(Boolean));
  return element;
}

function read(tex, isDisplay) {
  if (tex.length > MAX_LENGTH) return null;
  try {
    const tree = globalThis.temml.__renderToMathMLTree(tex, {
      displayMode: isDisplay,
      throwOnError: true,
      trust: false,
      strict: false,
      maxExpand: 200,
      maxSize: [20, 20],
    });
    return tree.type === "math" ? build(tree) : null;
  } catch {
    return null;
  }
}

// The formula; its source as code where it cannot be read, as while it is written.
export function drawMaths(tex, isDisplay) {
  const key = `${isDisplay}${tex}`;
  if (!kept.has(key)) {
    if (kept.size >= MAX_KEPT) kept.clear();
    kept.set(key, read(tex, isDisplay));
  }
  const found = kept.get(key)?.cloneNode(true) ?? Object.assign(document.createElement("code"), { textContent: tex });
  if (!isDisplay) return found;
  const place = Object.assign(document.createElement("span"), { className: "maths", tabIndex: 0 });
  place.append(found);
  return place;
}

const isEscaped = (text, at) => /\\*$/.exec(text.slice(Math.max(0, at - 20), at))[0].length % 2 === 1;

// `$x$`, as long as that is no price: no blank inside next to the dollars, and no digit behind the last.
function inlineDollar(state) {
  const { src, pos } = state;
  if (src[pos] !== "$" || src[pos + 1] === "$" || !/\S/.test(src[pos + 1] ?? " ")) return null;
  let end = pos + 1;
  do end = src.indexOf("$", end + 1);
  while (end > 0 && isEscaped(src, end));
  if (end < 0 || end >= state.posMax || /\s/.test(src[end - 1]) || /\d/.test(src[end + 1] ?? "")) return null;
  return { tex: src.slice(pos + 1, end), end: end + 1 };
}

const CLOSED_BY = { $$: "$$", "\\(": "\\)", "\\[": "\\]" };

function inlineMarked(state) {
  const { src, pos } = state,
    close = CLOSED_BY[src.slice(pos, pos + 2)];
  if (!close) return null;
  const end = src.indexOf(close, pos + 2);
  // `\[text\](address)` is a link that was escaped.
  const isLink = close === "\\]" && src[end + 2] === "(";
  return end < 0 || end + 2 > state.posMax || end === pos + 2 || isLink
    ? null
    : { tex: src.slice(pos + 2, end), end: end + 2, isDisplay: close !== "\\)" };
}

function inline(state, isSilent) {
  const found = inlineMarked(state) ?? inlineDollar(state);
  if (!found) return false;
  if (!isSilent)
    Object.assign(state.push("maths", "", 0), {
      content: found.tex.trim(),
      meta: { isDisplay: Boolean(found.isDisplay) },
    });
  state.pos = found.end;
  return true;
}

// `$$` or `\[` at the beginning of a line, up to the line that ends with its counterpart, or to the end of the text.
function block(state, startLine, endLine, isSilent) {
  const lineOf = (line) => state.src.slice(state.bMarks[line] + state.tShift[line], state.eMarks[line]);
  const first = lineOf(startLine),
    open = first.slice(0, 2),
    close = CLOSED_BY[open];
  if (!close || open === "\\(") return false;
  const rest = first.slice(2).trimEnd();
  // What has text behind its end is a part of a paragraph.
  if (rest.includes(close) && !rest.endsWith(close)) return false;
  if (isSilent) return true;
  const lines = [];
  let line = startLine,
    isClosed = rest.endsWith(close);
  lines.push(isClosed ? rest.slice(0, -2) : rest);
  while (!isClosed && (line += 1) < endLine) {
    const text = lineOf(line).trimEnd();
    isClosed = text.endsWith(close);
    lines.push(isClosed ? text.slice(0, -2) : text);
  }
  state.line = Math.min(endLine, line + 1);
  const token = state.push("maths", "", 0);
  Object.assign(token, {
    content: lines.join("\n").trim(),
    block: true,
    map: [startLine, state.line],
    meta: { isDisplay: true },
  });
  return true;
}

// A plug-in of the parser: tokens of the type "maths", with the LaTeX as their content.
export function maths(parser) {
  parser.inline.ruler.before("escape", "maths", inline);
  parser.block.ruler.before("fence", "maths", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
}
