// Tokens with their probabilities: the alternatives of each in a box, of which one can be chosen to fork from there.

import { $, make } from "../base/elements.js";

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const shown = (text) => text.replaceAll("\n", "\u21b5").replaceAll(" ", "\u00b7") || "\u2205";
// A special token ends the answer: there is nothing to continue.
const isSpecial = (text) => /^<.*>$/.test(text);

// A token of a stream as it is kept: text, log probability, alternatives, and the bytes where they are no whole
// characters.
export function keptToken({ token, logprob, bytes, top_logprobs: others }) {
  const partly = (each) =>
    each.bytes && new TextDecoder().decode(Uint8Array.from(each.bytes)) !== each.token ? [each.bytes] : [];
  return [
    token,
    logprob,
    others.map((each) => [each.token, each.logprob, ...partly(each)]),
    ...partly({ token, bytes }),
  ];
}

// The text of some tokens; null where it ends within a character.
function textOf(tokens, content) {
  const encoder = new TextEncoder();
  const bytes = tokens.flatMap((token) => [...(token[3] ?? encoder.encode(token[0]))]);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes));
  } catch {
    return null;
  }
  // A tokenizer may leave out the blank before the first word.
  const first = tokens[0]?.[0] ?? "";
  return first.startsWith(" ") && !content.startsWith(" ") ? text.slice(1) : text;
}

// Returns the beginning of an answer with another token at a place, as text and tokens; null where there is none.
export function forkAt(message, at, [text, logprob, bytes]) {
  const tokens = [...message.tokens.slice(0, at), [text, logprob, message.tokens[at][2], ...(bytes ? [bytes] : [])]];
  const content = isSpecial(text) || message.reasoning ? null : textOf(tokens, message.content);
  return content === null ? null : { content, tokens };
}

// Shows a message's tokens in an element; one is in the tab order, arrows go to the others, Enter opens one.
export function drawTokens(message, element, onFork) {
  const box = $("alternatives");
  let opened = null;
  const spans = message.tokens.map(([token, logprob]) => {
    const share = Math.exp(logprob),
      name = share > 0.9 ? "likely" : share < 0.2 ? "rare" : "";
    const span = make("span", { textContent: token, className: name, tabIndex: -1 });
    span.setAttribute("role", "button");
    span.setAttribute("aria-label", `${shown(token)}, ${percent(logprob)}`);
    return span;
  });
  const close = () => {
    box.hidden = true;
    opened = null;
  };
  const show = (span) => {
    const at = spans.indexOf(span),
      [token, logprob, others] = message.tokens[at];
    opened = span;
    box.replaceChildren(make("strong", { textContent: `${shown(token)} ${percent(logprob)}` }));
    for (const other of others) {
      const begun = other[0] === token ? null : forkAt(message, at, other);
      const row = make(
        begun && onFork ? "button" : "div",
        { className: "alternative" },
        make("span", { textContent: shown(other[0]) }),
        percent(other[1]),
      );
      const bar = make("i");
      bar.style.width = `${100 * Math.exp(other[1])}%`;
      row.append(bar);
      if (begun && onFork) {
        row.type = "button";
        row.setAttribute("aria-label", `Fork here with ${shown(other[0])}, ${percent(other[1])}`);
        row.addEventListener("click", () => {
          close();
          onFork(begun);
        });
      }
      box.append(row);
    }
    box.hidden = false;
    const place = span.getBoundingClientRect(),
      size = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - size.width - 8))}px`;
    const top = place.bottom + size.height > innerHeight ? place.top - size.height : place.bottom;
    box.style.top = `${Math.max(4, Math.min(top, innerHeight - size.height))}px`;
  };
  element.classList.add("tokens");
  element.replaceChildren(...spans);
  if (spans.length) spans[0].tabIndex = 0;
  $("talk").onscroll = close;
  element.onmouseover = (event) => {
    if (spans.includes(event.target)) show(event.target);
  };
  element.onclick = (event) => {
    if (spans.includes(event.target)) show(event.target);
  };
  element.onmouseleave = (event) => {
    if (!box.contains(event.relatedTarget)) close();
  };
  box.onmouseleave = (event) => {
    if (!element.contains(event.relatedTarget) && !box.contains(document.activeElement)) close();
  };
  element.onkeydown = (event) => {
    const at = spans.indexOf(document.activeElement),
      next = spans[at + { ArrowLeft: -1, ArrowRight: 1 }[event.key]];
    if (next) {
      event.preventDefault();
      spans[at].tabIndex = -1;
      next.tabIndex = 0;
      next.focus();
    }
    if (event.key === "Enter" && at >= 0) {
      event.preventDefault();
      show(spans[at]);
      box.querySelector("button")?.focus();
    }
    if (event.key === "Escape") close();
  };
  box.onkeydown = (event) => {
    const rows = [...box.querySelectorAll("button")],
      next = rows[rows.indexOf(document.activeElement) + { ArrowUp: -1, ArrowDown: 1 }[event.key]];
    if (next) {
      event.preventDefault();
      next.focus();
    }
    if (event.key === "Escape" || event.key === "Tab") {
      const back = opened;
      close();
      back?.focus();
      event.preventDefault();
    }
  };
}

export const hideTokens = (element) => {
  $("alternatives").hidden = true;
  element.classList.remove("tokens");
  for (const name of ["onmouseover", "onmouseleave", "onclick", "onkeydown"]) element[name] = null;
};
