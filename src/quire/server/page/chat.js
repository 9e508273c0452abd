// The chat: messages, streams, branches and parameters.

import { count, events, make, request } from "./api.js";
import * as store from "./conversations.js";
import { render } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const PARAMETERS = [
  ["temperature", "temperature", { min: 0, max: 2, step: 0.1 }], ["max_tokens", "most tokens", { min: 1, step: 1 }],
  ["top_p", "top p", { min: 0, max: 1, step: 0.05 }], ["top_k", "top k", { min: 0, step: 1 }],
  ["min_p", "min p", { min: 0, max: 1, step: 0.01 }], ["seed", "seed", { step: 1 }],
  ["repetition_penalty", "repetition penalty", { min: 0.1, step: 0.1 }],
  ["presence_penalty", "presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "frequency penalty", { min: -2, max: 2, step: 0.1 }],
];
let all = [], shown = null, running = null, hasChat = true;

export function startChat(withTemplate) {
  hasChat = withTemplate;
  const kept = JSON.parse(localStorage.getItem("quire.settings") ?? "{}");
  for (const [name, label, limits] of PARAMETERS) {
    const input = make("input", { type: "number", id: name, placeholder: "model's", ...limits });
    input.value = kept[name] ?? (name === "max_tokens" ? 512 : "");
    $("fields").append(make("label", {}, label, input));
  }
  for (const id of ["system", "schema"]) $(id).value = kept[id] ?? "";
  $("settings").addEventListener("change", () => {
    const values = [...PARAMETERS.map(([name]) => name), "system", "schema"].map((id) => [id, $(id).value]);
    localStorage.setItem("quire.settings", JSON.stringify(Object.fromEntries(values)));
  });
  all = store.load();
  open(all[0] ?? store.create());
  listen();
  // A keyboard that opens by itself hides half of a phone.
  if (matchMedia("(hover: hover) and (pointer: fine)").matches) $("input").focus();
}

function listen() {
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) { running.abort(); return; }
    const text = $("input").value;
    if (!text.trim()) return;
    $("input").value = "";
    say(text, shown.leaf);
  });
  $("input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  });
  $("conversations").addEventListener("change", () => { running?.abort(); open(all.find((each) => each.id === $("conversations").value)); });
  $("new").addEventListener("click", () => { running?.abort(); open(store.create()); $("input").focus(); });
  $("delete").addEventListener("click", () => {
    running?.abort();
    store.remove(shown);
    all = all.filter((each) => each !== shown);
    open(all[0] ?? store.create());
  });
  $("export").addEventListener("click", () => {
    const link = make("a", { download: "conversation.json" });
    link.href = URL.createObjectURL(new Blob([JSON.stringify(shown, null, 2)], { type: "application/json" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

function open(conversation) {
  shown = conversation;
  list();
  draw();
}

function list() {
  const listed = all.includes(shown) ? all : [shown, ...all];
  $("conversations").replaceChildren(...listed.map((each) => make("option", { value: each.id, textContent: each.title })));
  $("conversations").value = shown.id;
}

function keep(conversation) {
  if (!all.includes(conversation)) all.unshift(conversation);
  if (!store.save(conversation)) $("announce").textContent = "The browser has no room to keep this conversation.";
  list();
}

function follow() { $("talk").scrollTop = $("talk").scrollHeight; }

function draw() {
  const messages = store.path(shown);
  $("talk").replaceChildren(...messages.map(drawMessage));
  if (!messages.length) {
    const hint = hasChat ? "Say something. Conversations are kept in this browser only." : "The model has no chat template: it continues your text.";
    $("talk").append(make("p", { className: "empty", textContent: hint }));
  }
  follow();
}

function button(text, label, onClick) {
  const element = make("button", { type: "button", className: "quiet", textContent: text });
  element.setAttribute("aria-label", label);
  element.addEventListener("click", onClick);
  return element;
}

function drawMessage(message) {
  const text = make("div", { className: "text" });
  const element = make("div", { className: `message ${message.role}` });
  if (message.error) element.classList.add("error");
  if (message.reasoning) element.append(thinking(message.reasoning, !message.content));
  if (message.role === "user") text.textContent = message.content;
  else text.append(...render(message.error ?? message.content));
  element.append(text, tools(message, text));
  return element;
}

function thinking(text, isOpen) {
  return make("details", { className: "thinking", open: isOpen }, make("summary", { textContent: "Thinking" }), ...render(text));
}

function tools(message, text) {
  const row = make("div", { className: "tools" }), others = store.siblings(shown, message);
  if (others.length > 1) {
    const at = others.indexOf(message);
    const turn = (step) => () => { if (running) return; store.follow(shown, others[(at + step + others.length) % others.length]); keep(shown); draw(); };
    row.append(button("\u2039", "Previous branch", turn(-1)), `${at + 1}/${others.length}`, button("\u203a", "Next branch", turn(1)));
  }
  if (message.role === "user") row.append(button("Edit", "Edit this message, as a new branch", () => edit(message, text)));
  else {
    row.append(button("Regenerate", "Answer again, as a new branch", () => { if (!running) answer(shown, message.parent); }));
    if (message.content) row.append(button("Copy", "Copy this answer", () => navigator.clipboard?.writeText(message.content)));
    if (message.tokens) row.append(button("Tokens", "Show the probability of each token", () => drawTokens(message, text)));
    if (message.note) row.append(make("span", { className: "note", textContent: message.note }));
  }
  return row;
}

function edit(message, text) {
  if (running) return;
  const area = make("textarea", { value: message.content, rows: 3 });
  area.setAttribute("aria-label", "Edited message");
  const send = button("Send", "Send the edited message as a new branch", () => say(area.value, message.parent));
  text.replaceChildren(area, send, button("Cancel", "Cancel editing", draw));
  area.focus();
}

// Each token with its probability in a tooltip; one is in the tab order, arrows go to the others.
function drawTokens(message, text) {
  if (text.classList.contains("tokens")) { text.classList.remove("tokens"); text.replaceChildren(...render(message.content)); return; }
  const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const spans = message.tokens.map(([token, logprob, others]) => {
    const share = Math.exp(logprob), name = share > 0.9 ? "likely" : share < 0.2 ? "rare" : "";
    const title = `${percent(logprob)}; ${others.map(([other, each]) => `${JSON.stringify(other)} ${percent(each)}`).join(", ")}`;
    const span = make("span", { textContent: token, title, className: name, tabIndex: -1 });
    span.setAttribute("aria-label", `${token}, ${title}`);
    return span;
  });
  if (spans.length) spans[0].tabIndex = 0;
  text.classList.add("tokens");
  text.replaceChildren(...spans);
  text.onkeydown = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key], next = spans[spans.indexOf(document.activeElement) + step];
    if (next) { event.preventDefault(); next.focus(); }
  };
}

function say(text, parent) {
  const message = store.add(shown, parent, "user", text);
  keep(shown);
  answer(shown, message.id);
}

function bodyOf(conversation, parent) {
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const [name] of PARAMETERS) if ($(name).value) body[name] = Number($(name).value);
  if ($("schema").value.trim()) {
    let schema;
    try { schema = JSON.parse($("schema").value); } catch (error) { throw new Error(`The JSON schema is not JSON: ${error.message}`); }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  const said = store.path(conversation, parent).filter((message) => !message.error);
  if (!hasChat) return { ...body, prompt: said.at(-1).content };
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 4 });
  return { ...body, messages: [...system, ...said.map(({ role, content }) => ({ role, content }))] };
}

async function answer(conversation, parent) {
  const isBranch = conversation.messages.some((other) => other.parent === parent)
    || store.siblings(conversation, conversation.messages[parent]).length > 1;
  const message = store.add(conversation, parent, "assistant", "");
  draw();
  const element = $("talk").lastElementChild, text = element.querySelector(".text");
  element.classList.add("busy");
  running = new AbortController();
  $("send").textContent = "Stop";
  const began = performance.now();
  let first = null, usage = null;
  try {
    const path = hasChat ? "v1/chat/completions" : "v1/completions";
    const response = await request(path, { body: bodyOf(conversation, parent), signal: running.signal });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) first = read(message, choice) ? first ?? performance.now() : first;
      if (conversation !== shown) continue;
      const parts = message.reasoning ? [thinking(message.reasoning, !message.content)] : [];
      element.querySelector(".thinking")?.remove();
      element.prepend(...parts);
      text.replaceChildren(...render(message.content));
      follow();
    }
  } catch (error) {
    if (error.name !== "AbortError") message.error = error.message;
  }
  running = null;
  $("send").textContent = "Send";
  if (usage && first) message.note = note(usage, first - began, performance.now() - first, isBranch);
  keep(conversation);
  if (conversation === shown) draw();
  $("announce").textContent = message.error ? `Failed: ${message.error}` : `Answer: ${message.content}`;
}

// Adds a piece of the stream to a message; returns whether it had text.
function read(message, choice) {
  const delta = hasChat ? choice.delta : { content: choice.text };
  const reasoning = delta.reasoning ?? delta.reasoning_content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  if (delta.content) message.content += delta.content;
  for (const token of choice.logprobs?.content ?? []) {
    (message.tokens ??= []).push([token.token, token.logprob, token.top_logprobs.map((each) => [each.token, each.logprob])]);
  }
  return Boolean(reasoning || delta.content);
}

function note(usage, waited, wrote, isBranch) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, total = usage.prompt_tokens;
  const shared = isBranch ? `branch: ${count(cached)} of ${count(total)} prompt tokens shared` : `${count(total)} tokens read, ${count(cached)} from cache`;
  const rate = usage.completion_tokens > 1 && wrote > 0 ? `, ${((usage.completion_tokens - 1) / wrote * 1000).toFixed(1)} tokens/s` : "";
  return `${shared}; ${count(usage.completion_tokens)} written; first after ${(waited / 1000).toFixed(2)} s${rate}`;
}
