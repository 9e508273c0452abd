// The chat: what is said, answered, branched and shown.

import { $, make } from "../base/elements.js";
import { stream } from "./answer.js";
import { Attachments } from "./attachments.js";
import * as tree from "./conversations.js";
import { Library } from "./library.js";
import { drawMessage, fill } from "./messages.js";
import { numSamples, startSettings } from "./settings.js";
import { keepDraft, keepPictures, keptDraft, keptPictures } from "./storage.js";

// Nearer to the end than this, the view follows the answer.
const NEAR_PX = 80;
// Unfinished answers are written to the storage this often, and drawn at most every fifth part of the time it takes.
const KEEP_MS = 1000,
  REST_PER_COST = 4,
  FRAME_MS = 16;
// Statuses of the server for what it will not answer however often it is asked.
const REFUSED = [400, 413];
const running = new Map();
const attachments = new Attachments(keepPictures);
let library = null,
  shown = null,
  hasChat = true,
  blockSize = null;

const isBusy = (conversation = shown) => running.has(conversation.id);
// Does something with the shown conversation unless an answer is being written into it.
const unlessBusy =
  (act) =>
  (...values) => {
    if (!isBusy()) act(...values);
  };

const actions = {
  isBusy: () => isBusy(),
  redraw: () => draw(),
  say: unlessBusy((text, parent, pictures) => {
    forget();
    say(text, parent, pictures);
  }),
  regenerate: unlessBusy((parent) => {
    forget();
    answer(shown, parent);
  }),
  branch: unlessBusy((message) => {
    tree.follow(shown, message);
    library.keep(shown, []);
    draw();
  }),
  fork: unlessBusy((message, { content, tokens }) => {
    const begun = tree.add(shown, message.parent, "assistant", content, { tokens });
    answer(shown, message.parent, begun);
  }),
  // An answer that this tab did not write to its end may still be written by another one: it goes on as a branch.
  goOn: unlessBusy((message) => {
    const { content, tokens, limit, reasoning, parent } = message;
    const begun =
      message.end === "open" ? tree.add(shown, parent, "assistant", content, { tokens, limit, reasoning }) : message;
    answer(shown, parent, begun);
  }),
  result: unlessBusy((message, results) => {
    let parent = message.id;
    for (const [call, text] of results)
      parent = tree.add(shown, parent, "tool", text, { callId: call.id, name: call.name }).id;
    library.keep(shown);
    answer(shown, parent);
  }),
};

export function startChat(status, model) {
  hasChat = status?.has_chat ?? true;
  blockSize = status?.block_size ?? null;
  startSettings(hasChat, Boolean(model?.reasoning_parser));
  if (hasChat && model?.input_modalities?.includes("image")) attachments.start();
  library = new Library({
    onOpen: open,
    onChange: () => {
      if (!isBusy()) draw();
    },
    isBusy,
  });
  library.open(library.all[0] ?? tree.create());
  $("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (isBusy()) {
      running.get(shown.id).abort();
      return;
    }
    const { draft } = attachments;
    await attachments.ready;
    const text = $("input").value,
      { pictures } = draft;
    if (draft !== attachments.draft || isBusy() || !(text.trim() || pictures.length)) return;
    // Behind what was refused, everything would be: the next message takes its place.
    const asked = refusedMessage(),
      parent = asked ? asked.parent : shown.leaf;
    compose("", []);
    say(text, parent, pictures);
  });
  $("input").addEventListener("input", () => type($("input").value));
  $("input").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!isBusy()) $("form").requestSubmit();
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && isBusy() && !event.defaultPrevented) running.get(shown.id).abort();
  });
  // A keyboard that opens by itself hides half of a phone.
  if (matchMedia("(hover: hover) and (pointer: fine)").matches) $("input").focus();
  else $("input").placeholder = "Message";
}

// Sets what is typed, and makes the box as high as it needs, where the browser does not do that itself.
function type(text) {
  const box = $("input");
  if (box.value !== text) box.value = text;
  if (!CSS.supports("field-sizing", "content")) {
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + 2}px`;
  }
  keepDraft(shown.id, text);
}

function compose(text, pictures) {
  type(text);
  attachments.show(shown.id, pictures);
}

function open(conversation) {
  shown = conversation;
  draw();
  compose(keptDraft(conversation.id), keptPictures(conversation.id));
}

// The last message, where the server refused to answer it.
function refusedMessage() {
  const last = tree.find(shown, shown.leaf),
    asked = last?.refused && tree.find(shown, last.parent);
  return asked?.role === "user" ? asked : null;
}

// Puts what was refused back into the composer, unless something else is there by now.
function takeBack(conversation, { id, role, content, pictures = [] }) {
  const isAnswered = conversation.messages.some((other) => other.parent === id && (other.content || other.calls));
  const hasDraft = keptDraft(conversation.id) || keptPictures(conversation.id).length;
  if (role !== "user" || isAnswered || hasDraft) return;
  keepDraft(conversation.id, content);
  keepPictures({ id: conversation.id, pictures });
  if (conversation === shown) compose(content, pictures);
}

// What was refused is asked in another way: it leaves the composer, where nothing of it was changed.
function forget() {
  if (refusedMessage()?.content === $("input").value) compose("", []);
}

function draw() {
  const messages = tree.path(shown);
  $("alternatives").hidden = true;
  $("talk").replaceChildren(...messages.map((message) => drawMessage(shown, message, actions)));
  if (!messages.length) {
    const hint = hasChat
      ? "Say something. Conversations are kept in this browser only."
      : "The model has no chat template: it continues your text.";
    $("talk").append(make("p", { className: "empty", textContent: hint }));
  }
  $("talk").scrollTop = $("talk").scrollHeight;
  $("send").textContent = isBusy() ? "Stop" : "Send";
}

function say(text, parent, pictures = []) {
  const message = tree.add(shown, parent, "user", text, pictures.length ? { pictures } : {});
  library.keep(shown, [message]);
  answer(shown, message.id);
}

// Shows the pieces of messages as they come, as often as the page has time for.
function painter(conversation, messages) {
  let isDue = false;
  return () => {
    if (isDue || conversation !== shown) return;
    isDue = true;
    requestAnimationFrame(() => {
      const began = performance.now(),
        talk = $("talk");
      const isNear = talk.scrollHeight - talk.scrollTop - talk.clientHeight < NEAR_PX;
      for (const message of messages) {
        const element = talk.querySelector(`[data-id="${message.id}"]`);
        if (element) fill(element, message);
      }
      if (isNear) talk.scrollTop = talk.scrollHeight;
      setTimeout(
        () => {
          isDue = false;
        },
        Math.max(FRAME_MS, REST_PER_COST * (performance.now() - began)),
      );
    });
  };
}

// Answers behind a message; where `begun` is given, goes on with that message.
async function answer(conversation, parent, begun = null) {
  const isFork = begun !== null || conversation.messages.some((other) => other.parent === parent);
  const isBranch = isFork || tree.siblings(conversation, tree.find(conversation, parent)).length > 1;
  const num = begun ? 1 : numSamples(),
    batch = num > 1 ? { batch: tree.newId() } : {};
  const messages = begun
    ? [begun]
    : Array.from({ length: num }, () => tree.add(conversation, parent, "assistant", "", { ...batch }));
  for (const message of messages) message.end = "open";
  conversation.leaf = messages[0].id;
  const own = new AbortController();
  running.set(conversation.id, own);
  library.keep(conversation, messages);
  if (conversation === shown) draw();
  const keeping = setInterval(() => library.keep(conversation, messages), KEEP_MS);
  const given = { conversation, parent, messages, begun: begun?.content ?? null, hasChat, blockSize, isBranch };
  const failed = await stream({ ...given, signal: own.signal, onPiece: painter(conversation, messages) });
  clearInterval(keeping);
  const isRefused = REFUSED.includes(failed?.status);
  if (isRefused) for (const message of messages) message.refused = true;
  running.delete(conversation.id);
  library.keep(conversation, messages);
  if (isRefused) takeBack(conversation, tree.find(conversation, parent));
  if (conversation === shown) draw();
  // Once, and not with every token.
  const [{ error, content }] = messages;
  $("announce").textContent = error ? `Failed: ${error}` : `Answer: ${content}`;
}
