// Markdown as elements. Text of the model only ever becomes text nodes: there is no HTML, and no link is followed.

import { make } from "./api.js";

const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s][^*]*?)\*|~~(.+?)~~|\[([^\]]+)\]\(([^)\s]+)\)/s;

function inline(text) {
  const parts = [];
  for (let match; (match = INLINE.exec(text)); text = text.slice(match.index + match[0].length)) {
    if (match.index) parts.push(text.slice(0, match.index));
    const [, , code, bold, strong, slanted, struck, label, address] = match;
    if (code !== undefined) parts.push(make("code", { textContent: code.trim() || code }));
    else if (bold ?? strong) parts.push(make("strong", {}, ...inline(bold ?? strong)));
    else if (slanted) parts.push(make("em", {}, ...inline(slanted)));
    else if (struck) parts.push(make("s", {}, ...inline(struck)));
    else parts.push(...inline(label), ` (${address})`);
  }
  if (text) parts.push(text);
  return parts;
}

function code(lines) {
  const text = lines.join("\n"), button = make("button", { type: "button", className: "quiet", textContent: "Copy" });
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; }
    catch { button.textContent = "Not allowed"; }
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return make("div", { className: "code" }, make("pre", { tabIndex: 0 }, make("code", { textContent: text })), button);
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function table(lines) {
  const row = (line, kind) => make("tr", {}, ...cells(line).map((cell) => make(kind, {}, ...inline(cell))));
  return make("table", {}, make("thead", {}, row(lines[0], "th")),
    make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td"))));
}

const KINDS = [
  [/^#{1,6}\s/, (lines) => lines.map((line) => make(`h${Math.min(5, 2 + line.indexOf(" "))}`, {}, ...inline(line.replace(/^#+\s+/, ""))))],
  [/^\s*[-*+]\s+/, (lines, mark) => [make("ul", {}, ...lines.map((line) => make("li", {}, ...inline(line.replace(mark, "")))))]],
  [/^\s*\d{1,9}[.)]\s+/, (lines, mark) => [make("ol", { start: parseInt(lines[0], 10) }, ...lines.map((line) => make("li", {}, ...inline(line.replace(mark, "")))))]],
  [/^>\s?/, (lines, mark) => [make("blockquote", {}, ...render(lines.map((line) => line.replace(mark, "")).join("\n")))]],
];

// Returns the elements of a text, which may end anywhere.
export function render(text) {
  const lines = text.split("\n"), found = [];
  for (let at = 0; at < lines.length;) {
    const line = lines[at], fence = /^\s*(```+|~~~+)/.exec(line);
    let end = at + 1;
    if (fence) {
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
      found.push(code(lines.slice(at + 1, end)));
      at = end + 1;
      continue;
    }
    const kind = KINDS.find(([mark]) => mark.test(line));
    if (kind) {
      while (end < lines.length && kind[0].test(lines[end])) end += 1;
      found.push(...kind[1](lines.slice(at, end), kind[0]));
    } else if (line.includes("|") && /^[\s|:-]+$/.test(lines[end] ?? "") && lines[end].includes("-")) {
      while (end < lines.length && lines[end].includes("|")) end += 1;
      found.push(table(lines.slice(at, end)));
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(line)) {
      found.push(make("hr"));
    } else if (line.trim()) {
      while (end < lines.length && lines[end].trim() && !/^\s*(```|~~~|#{1,6}\s|[-*+]\s|\d+[.)]\s|>)/.test(lines[end])) end += 1;
      const parts = lines.slice(at, end).flatMap((each, idx) => (idx ? [make("br"), each] : [each]));
      found.push(make("p", {}, ...parts.flatMap((part) => (typeof part === "string" ? inline(part) : [part]))));
    }
    at = end;
  }
  return found;
}
