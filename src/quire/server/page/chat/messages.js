// Messages as elements: text, thinking, calls of tools with boxes for their results, and what can be done with each.

import { button, copyButton, make } from "../base/elements.js";
import { count } from "../base/words.js";
import { row as rowOfPictures } from "./attachments.js";
import * as tree from "./conversations.js";
import { show } from "./markdown.js";
import { drawTokens, hideTokens } from "./tokens.js";

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const cardOf = ({ name, arguments: text }) =>
  make(
    "div",
    { className: "call" },
    make("strong", { textContent: `Call of ${name}` }),
    make("pre", { textContent: pretty(text), tabIndex: 0 }),
  );

// The calls of a message; where it is the last one, with a box for the result of each.
function cards(message, isLast, actions) {
  const found = message.calls.map((call) => {
    return { call, card: cardOf(call), area: make("textarea", { rows: 2, placeholder: '{"celsius": 21}' }) };
  });
  if (!isLast) return found.map(({ card }) => card);
  for (const { call, card, area } of found) card.append(make("label", {}, `Result of ${call.name}`, area));
  const send = make("button", {
    type: "button",
    textContent: found.length > 1 ? "Send the results" : "Send the result",
  });
  send.addEventListener("click", () =>
    actions.result(
      message,
      found.map(({ call, area }) => [call, area.value]),
    ),
  );
  return [...found.map(({ card }) => card), send];
}

// The thinking of a message, folded once the answer has begun unless it was opened by hand.
function showThinking(element, text, message) {
  let box = element.querySelector(":scope > .thinking");
  if (!message.reasoning) return;
  if (!box) {
    box = make("details", { className: "thinking" }, make("summary"), make("div"));
    box.firstChild.addEventListener("click", () => {
      box.dataset.byHand = "yes";
    });
    text.before(box);
  }
  const isThinking = message.end === "open" && !message.content;
  box.firstChild.textContent = isThinking ? "Thinking\u2026" : "Thinking";
  if (!box.dataset.byHand) box.open = isThinking;
  show(box.lastChild, message.reasoning);
}

// Fills an element with what a message has so far.
export function fill(element, message) {
  const text = element.querySelector(":scope > .text");
  showThinking(element, text, message);
  if (message.role === "assistant") show(text, message.content);
  else text.textContent = message.content;
  const hasOther = message.calls || message.reasoning || message.end !== "open";
  text.hidden = !message.content && Boolean(message.role === "assistant" ? hasOther : message.pictures);
  return text;
}

export function drawMessage(conversation, message, actions) {
  const samples = tree.samplesOf(conversation, message);
  if (samples.length < 2) return drawOne(conversation, message, actions);
  const columns = samples.map((each, at) => {
    const element = drawOne(conversation, each, actions, { isSample: true });
    const label = `Sample ${at + 1}${each === message ? ", goes on" : ""}`;
    element.prepend(make("div", { className: "note", textContent: label }));
    if (each === message) element.classList.add("chosen");
    else element.querySelector(".tools").prepend(button("Use this", `sample ${at + 1}`, () => actions.branch(each)));
    return element;
  });
  const group = make("div", { className: "samples" }, ...columns);
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", `${samples.length} samples`);
  return group;
}

function drawOne(conversation, message, actions, { isSample = false } = {}) {
  const element = make("div", { className: `message ${message.role}` }, make("div", { className: "text" }));
  element.dataset.id = message.id;
  const isWritten = message.end === "open" && actions.isBusy();
  element.classList.toggle("busy", isWritten);
  if (message.role === "tool")
    element.prepend(make("div", { className: "note", textContent: `Result of ${message.name}` }));
  const text = fill(element, message);
  if (message.pictures) text.before(rowOfPictures(message.pictures));
  if (message.calls) element.append(...cards(message, conversation.leaf === message.id && !actions.isBusy(), actions));
  if (!isWritten) element.append(...endOf(message, actions));
  element.append(toolsOf(conversation, message, text, actions, isSample));
  return element;
}

const ENDS = {
  length: ({ limit }) => (limit ? `Cut at ${count(limit)} tokens` : "Cut: it reached the limit of tokens"),
  stopped: () => "Stopped",
  lost: () => "The connection ended",
  open: () => "Not finished: it is being written in another tab, or that tab was closed",
  failed: () => "Failed",
};

// How an answer ended that may have more to say, under what it said, with a button to go on.
function endOf(message, actions) {
  const { end, error, content, calls, reasoning } = message;
  if (message.role !== "assistant" || !(end in ENDS || error)) return [];
  const where = reasoning && !content ? " while it was thinking" : "";
  const line = make("div", { className: `end ${error ? "bad" : ""}` });
  line.append(make("span", { textContent: error ?? `${ENDS[end](message)}${where}.` }));
  if (content && !calls) line.append(button("Continue", "this answer from here", () => actions.goOn(message)));
  else if (error) line.append(button("Try again", "this answer", () => actions.regenerate(message.parent)));
  return [line];
}

function toolsOf(conversation, message, text, actions, isSample) {
  const row = make("div", { className: "tools" }),
    others = tree.siblings(conversation, message);
  if (others.length > 1 && !isSample) {
    const at = others.indexOf(message),
      other = (step) => others[(at + step + others.length) % others.length];
    row.append(
      button("\u2039", "previous branch", () => actions.branch(other(-1))),
      `${at + 1}/${others.length}`,
      button("\u203a", "next branch", () => actions.branch(other(1))),
    );
  }
  if (message.role === "user")
    row.append(button("Edit", "this message, as a new branch", () => edit(message, text, actions)));
  if (message.role === "user" && message.content) row.append(copyButton("this message", () => message.content));
  if (message.role !== "assistant") return row;
  if (!isSample)
    row.append(button("Regenerate", "another answer, as a new branch", () => actions.regenerate(message.parent)));
  if (message.content) row.append(copyButton("this answer", () => message.content));
  if (message.tokens)
    row.append(
      button("Tokens", "the probability of each", () => {
        if (!text.classList.contains("tokens")) {
          drawTokens(message, text, (begun) => actions.fork(message, begun));
          return;
        }
        hideTokens(text);
        show(text, message.content);
      }),
    );
  if (message.note) row.append(make("span", { className: "note", textContent: message.note }));
  return row;
}

function edit(message, text, actions) {
  if (actions.isBusy()) return;
  const area = make("textarea", { value: message.content, rows: 3 }),
    pictures = [...(message.pictures ?? [])];
  const drawPictures = () =>
    text.previousElementSibling?.replaceWith(
      rowOfPictures(pictures, (picture) => {
        pictures.splice(pictures.indexOf(picture), 1);
        drawPictures();
        area.focus();
      }),
    );
  area.setAttribute("aria-label", "Edited message");
  const send = () => {
    if (area.value.trim() || pictures.length) actions.say(area.value, message.parent, pictures);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") actions.redraw();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  const sendIt = button("Send", "the edited message, as a new branch", send);
  drawPictures();
  text.hidden = false;
  text.replaceChildren(area, sendIt, button("Cancel", "editing", actions.redraw));
  area.focus();
}
