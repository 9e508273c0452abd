// Messages as elements: text, thinking, calls of tools with boxes for their results, and what can be done with each.

import { make } from "./api.js";
import * as store from "./conversations.js";
import { render } from "./markdown.js";
import { drawTokens, hideTokens } from "./tokens.js";

// A button; its name for screen readers begins with its text, as those who speak commands need it.
export function button(text, about, onClick) {
  const element = make("button", { type: "button", className: "quiet", textContent: text });
  element.setAttribute("aria-label", `${text}: ${about}`);
  element.addEventListener("click", onClick);
  return element;
}

function thinking(text, isOpen) {
  return make("details", { className: "thinking", open: isOpen }, make("summary", { textContent: "Thinking" }), ...render(text));
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

const cardOf = ({ name, arguments: text }) =>
  make("div", { className: "call" }, make("strong", { textContent: `Call of ${name}` }), make("pre", { textContent: pretty(text), tabIndex: 0 }));

// The calls of a message; where it is the last one, with a box for the result of each.
function cards(message, isLast, actions) {
  const found = message.calls.map((call) => ({ call, card: cardOf(call), area: make("textarea", { rows: 2, placeholder: "{\"celsius\": 21}" }) }));
  if (!isLast) return found.map(({ card }) => card);
  for (const { call, card, area } of found) card.append(make("label", {}, `Result of ${call.name}`, area));
  const send = make("button", { type: "button", textContent: found.length > 1 ? "Send the results" : "Send the result" });
  send.addEventListener("click", () => actions.result(message, found.map(({ call, area }) => [call, area.value])));
  return [...found.map(({ card }) => card), send];
}

// Fills an element with what a message has so far.
export function fill(element, message) {
  const text = element.querySelector(":scope > .text");
  for (const old of element.querySelectorAll(":scope > .thinking, :scope > .call")) old.remove();
  if (message.reasoning) text.before(thinking(message.reasoning, !message.content));
  if (message.role === "assistant") text.replaceChildren(...render(message.error ?? message.content));
  else text.textContent = message.content;
  text.hidden = !text.textContent && Boolean(message.calls || message.reasoning);
  return text;
}

export function drawMessage(conversation, message, actions) {
  const samples = store.samplesOf(conversation, message);
  if (samples.length < 2) return drawOne(conversation, message, actions);
  const columns = samples.map((each, at) => {
    const element = drawOne(conversation, each, actions, { isSample: true });
    element.prepend(make("div", { className: "note", textContent: `Sample ${at + 1}${each === message ? ", goes on" : ""}` }));
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
  if (message.error) element.classList.add("error");
  if (message.role === "tool") element.prepend(make("div", { className: "note", textContent: `Result of ${message.name}` }));
  const text = fill(element, message);
  if (message.calls) element.append(...cards(message, conversation.leaf === message.id && !actions.isBusy(), actions));
  element.append(toolsOf(conversation, message, text, actions, isSample));
  return element;
}

function toolsOf(conversation, message, text, actions, isSample) {
  const row = make("div", { className: "tools" }), others = store.siblings(conversation, message);
  if (others.length > 1 && !isSample) {
    const at = others.indexOf(message), other = (step) => others[(at + step + others.length) % others.length];
    row.append(button("\u2039", "previous branch", () => actions.branch(other(-1))), `${at + 1}/${others.length}`,
      button("\u203a", "next branch", () => actions.branch(other(1))));
  }
  if (message.role === "user") row.append(button("Edit", "this message, as a new branch", () => edit(message, text, actions)));
  if (message.role !== "assistant") return row;
  if (!isSample) row.append(button("Regenerate", "another answer, as a new branch", () => actions.regenerate(message.parent)));
  if (message.content) row.append(button("Copy", "this answer", async (event) => {
    const { target } = event;
    try { await navigator.clipboard.writeText(message.content); target.textContent = "Copied"; } catch { target.textContent = "Not allowed"; }
    setTimeout(() => { target.textContent = "Copy"; }, 1500);
  }));
  if (message.tokens) row.append(button("Tokens", "the probability of each", () => {
    if (!text.classList.contains("tokens")) { drawTokens(message, text, (begun) => actions.fork(message, begun)); return; }
    hideTokens(text);
    text.replaceChildren(...render(message.content));
  }));
  if (message.note) row.append(make("span", { className: "note", textContent: message.note }));
  return row;
}

function edit(message, text, actions) {
  if (actions.isBusy()) return;
  const area = make("textarea", { value: message.content, rows: 3 });
  area.setAttribute("aria-label", "Edited message");
  const send = () => actions.say(area.value, message.parent);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") actions.redraw();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  text.replaceChildren(area, button("Send", "the edited message, as a new branch", send), button("Cancel", "editing", actions.redraw));
  area.focus();
}
