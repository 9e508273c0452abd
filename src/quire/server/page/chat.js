// The chat: what is said, answered, branched and shown.

import { make } from "./api.js";
import { stream } from "./answer.js";
import * as store from "./conversations.js";
import { Library } from "./library.js";
import { drawMessage, fill } from "./messages.js";
import { numSamples, startSettings } from "./settings.js";

const $ = (id) => document.getElementById(id);
// Nearer to the end than this, the view follows the answer.
const NEAR_PX = 80;
let library = null, shown = null, running = null, hasChat = true, blockSize = null;

const actions = {
  isBusy: () => running !== null,
  redraw: () => draw(),
  say: (text, parent) => { if (!running) say(text, parent); },
  regenerate: (parent) => { if (!running) answer(shown, parent); },
  branch: (message) => {
    if (running) return;
    store.follow(shown, message);
    library.keep(shown);
    draw();
  },
  fork: (message, begun) => { if (!running) answer(shown, message.parent, begun); },
  result: (message, results) => {
    if (running) return;
    let parent = message.id;
    for (const [call, text] of results) parent = store.add(shown, parent, "tool", text, { callId: call.id, name: call.name }).id;
    answer(shown, parent);
  },
};

export function startChat(status) {
  hasChat = status?.has_chat ?? true;
  blockSize = status?.block_size ?? null;
  startSettings(hasChat);
  library = new Library((conversation) => { running?.abort(); shown = conversation; draw(); });
  library.open(library.all[0] ?? store.create());
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) { running.abort(); return; }
    const text = $("input").value;
    if (!text.trim()) return;
    $("input").value = "";
    say(text, shown.leaf);
  });
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  });
  // A keyboard that opens by itself hides half of a phone.
  if (matchMedia("(hover: hover) and (pointer: fine)").matches) $("input").focus();
}

function draw() {
  const messages = store.path(shown);
  $("alternatives").hidden = true;
  $("talk").replaceChildren(...messages.map((message) => drawMessage(shown, message, actions)));
  if (!messages.length) {
    const hint = hasChat ? "Say something. Conversations are kept in this browser only." : "The model has no chat template: it continues your text.";
    $("talk").append(make("p", { className: "empty", textContent: hint }));
  }
  $("talk").scrollTop = $("talk").scrollHeight;
}

function say(text, parent) {
  const message = store.add(shown, parent, "user", text);
  library.keep(shown);
  answer(shown, message.id);
}

// Answers behind a message, from a given beginning on where there is one.
async function answer(conversation, parent, begun = null) {
  const isBranch = begun !== null || conversation.messages.some((other) => other.parent === parent)
    || store.siblings(conversation, conversation.messages[parent]).length > 1;
  const num = begun ? 1 : numSamples(), batch = num > 1 ? { batch: conversation.messages.length } : {};
  const messages = Array.from({ length: num }, () => store.add(conversation, parent, "assistant", begun?.content ?? "", { ...batch }));
  if (begun) messages[0].tokens = begun.tokens;
  conversation.leaf = messages[0].id;
  const own = new AbortController();
  running = own;
  draw();
  const elements = messages.map((message) => $("talk").querySelector(`[data-id="${message.id}"]`));
  for (const element of elements) element.classList.add("busy");
  $("send").textContent = "Stop";
  let isDue = false;
  const onPiece = () => {
    if (isDue || conversation !== shown) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      const talk = $("talk"), isNear = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_PX;
      messages.forEach((message, at) => fill(elements[at], message));
      if (isNear) talk.scrollTop = talk.scrollHeight;
    });
  };
  await stream({ conversation, parent, messages, begun, hasChat, blockSize, isBranch, signal: own.signal, onPiece });
  if (running === own) {
    running = null;
    $("send").textContent = "Send";
  }
  library.keep(conversation);
  if (conversation === shown) draw();
  // Once, and not with every token.
  $("announce").textContent = messages[0].error ? `Failed: ${messages[0].error}` : `Answer: ${messages[0].content}`;
}
