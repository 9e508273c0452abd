// The chat: what is said, answered, branched and shown.

import { $, make } from "../base/elements.js";
import { stream } from "./answer.js";
import * as tree from "./conversations.js";
import { Library } from "./library.js";
import { drawMessage, fill } from "./messages.js";
import { numSamples, startSettings } from "./settings.js";
import { keepDraft, keptDraft } from "./storage.js";

// Nearer to the end than this, the view follows the answer.
const NEAR_PX = 80;
// Unfinished answers are written to the storage this often, and drawn at most every fifth part of the time it takes.
const KEEP_MS = 1000,
  REST_PER_COST = 4,
  FRAME_MS = 16;
const running = new Map();
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
  say: unlessBusy((text, parent) => say(text, parent)),
  regenerate: unlessBusy((parent) => answer(shown, parent)),
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
  library = new Library({
    onOpen: open,
    onChange: () => {
      if (!isBusy()) draw();
    },
    isBusy,
  });
  library.open(library.all[0] ?? tree.create());
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (isBusy()) {
      running.get(shown.id).abort();
      return;
    }
    const text = $("input").value;
    if (!text.trim()) return;
    type("");
    say(text, shown.leaf);
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

function open(conversation) {
  shown = conversation;
  draw();
  type(keptDraft(conversation.id));
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

function say(text, parent) {
  const message = tree.add(shown, parent, "user", text);
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
  await stream({ ...given, signal: own.signal, onPiece: painter(conversation, messages) });
  clearInterval(keeping);
  running.delete(conversation.id);
  library.keep(conversation, messages);
  if (conversation === shown) draw();
  // Once, and not with every token.
  const [{ error, content }] = messages;
  $("announce").textContent = error ? `Failed: ${error}` : `Answer: ${content}`;
}
