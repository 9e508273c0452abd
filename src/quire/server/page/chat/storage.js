// Where conversations are kept: the local storage of this browser, an entry for each message, and one with the title
// and the shown path of each conversation.
//
// A tab writes an entry only for messages that it wrote itself, so no tab can overwrite what another one was told.

import { create, cutTitle, path, UNNAMED } from "./conversations.js";

const HEAD = "quire.conversation.",
  MESSAGE = "quire.message.";
const ROLES = ["user", "assistant", "tool"];

const headKey = (conversation) => HEAD + conversation.id;
const messageKey = (conversation, message) => `${MESSAGE}${conversation.id}.${message.id}`;
const headOf = ({ id, title, changed, leaf }) => ({ id, title, changed, leaf });

function read(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

// Ids of messages were numbers once; they stay the same in every tab that reads them.
const withTexts = (messages) =>
  messages.map((message, at) => ({
    made: at,
    ...message,
    id: String(message.id),
    parent: message.parent === null ? null : String(message.parent),
  }));

export function load() {
  const found = new Map(),
    keys = Object.keys(localStorage);
  for (const key of keys.filter((each) => each.startsWith(HEAD))) {
    const head = read(localStorage.getItem(key));
    if (!head?.id) continue;
    const conversation = { ...headOf(head), messages: [] };
    found.set(head.id, conversation);
    if (!head.messages) continue;
    conversation.messages = withTexts(head.messages);
    conversation.leaf = head.leaf === null ? null : String(head.leaf);
    save(conversation);
  }
  for (const key of keys.filter((each) => each.startsWith(MESSAGE))) {
    const [id] = key.slice(MESSAGE.length).split("."),
      message = read(localStorage.getItem(key));
    if (!message?.id) continue;
    if (!found.has(id)) found.set(id, { ...create(), id, changed: message.made });
    const { messages } = found.get(id);
    if (!messages.some((each) => each.id === message.id)) messages.push(message);
  }
  for (const conversation of found.values()) repair(conversation);
  return [...found.values()]
    .filter(({ messages }) => messages.length)
    .sort((one, other) => other.changed - one.changed);
}

// A tab that ended early may have left a message without the entry of its conversation, or a path to nothing.
function repair(conversation) {
  conversation.messages.sort((one, other) => one.made - other.made);
  const [first] = conversation.messages;
  if (conversation.title === UNNAMED && first) conversation.title = cutTitle(first.content) || UNNAMED;
  if (!path(conversation).length) conversation.leaf = conversation.messages.at(-1)?.id ?? null;
}

function write(key, value) {
  const text = JSON.stringify(value);
  if (localStorage.getItem(key) !== text) localStorage.setItem(key, text);
}

// Writes messages of a conversation, all where none are named; returns false if the browser has no room.
export function save(conversation, messages = conversation.messages) {
  try {
    for (const message of messages) write(messageKey(conversation, message), message);
    write(headKey(conversation), headOf(conversation));
    return true;
  } catch {
    return false;
  }
}

export function remove(conversation) {
  localStorage.removeItem(headKey(conversation));
  for (const key of Object.keys(localStorage))
    if (key.startsWith(`${MESSAGE}${conversation.id}.`)) localStorage.removeItem(key);
}

// Calls `onHead`, `onMessage` and `onRemove` for what other tabs write.
export function watch({ onHead, onMessage, onRemove }) {
  addEventListener("storage", ({ key, newValue }) => {
    const value = newValue && read(newValue);
    if (key?.startsWith(HEAD)) {
      if (newValue === null) onRemove(key.slice(HEAD.length));
      else if (value) onHead(value);
    } else if (key?.startsWith(MESSAGE) && value) onMessage(key.slice(MESSAGE.length).split(".")[0], value);
  });
}

export const toFile = (conversations) =>
  JSON.stringify({ format: "quire.conversations", version: 2, conversations }, null, 2);

// Reads a file of `toFile`, also of version 1; throws an error that says what is wrong with it.
export function fromFile(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is not JSON: ${error.message}`);
  }
  const listed = Array.isArray(found?.conversations) ? found.conversations : [found];
  if (!listed.length) throw new Error("The file has no conversations.");
  return listed.map((each, at) => readConversation(each ?? {}, at + 1));
}

function readConversation({ messages, title, leaf }, number) {
  const isId = (id) => typeof id === "string" || Number.isInteger(id),
    ids = new Set();
  const isMessage = (message) => {
    const isKnown =
      message &&
      isId(message.id) &&
      !ids.has(message.id) &&
      ROLES.includes(message.role) &&
      typeof message.content === "string" &&
      (message.pictures === undefined || (Array.isArray(message.pictures) && message.pictures.every(Boolean))) &&
      (message.parent === null || ids.has(message.parent));
    if (isKnown) ids.add(message.id);
    return isKnown;
  };
  if (!Array.isArray(messages) || !messages.every(isMessage)) {
    throw new Error(`Conversation ${number} of the file has no messages of this page.`);
  }
  // An id of its own, so that nothing that is there is overwritten.
  const made = {
    ...create(),
    messages: withTexts(messages),
    title: typeof title === "string" ? cutTitle(title) : UNNAMED,
  };
  made.leaf = ids.has(leaf) ? String(leaf) : (made.messages.at(-1)?.id ?? null);
  return made;
}

const draftKey = (id) => `quire.draft.${id}`,
  picturesKey = (id) => `quire.pictures.${id}`;

export const keptDraft = (id) => sessionStorage.getItem(draftKey(id)) ?? "";
export const keptPictures = (id) => read(sessionStorage.getItem(picturesKey(id))) ?? [];

function keepForTab(key, text) {
  try {
    if (text) sessionStorage.setItem(key, text);
    else sessionStorage.removeItem(key);
  } catch {
    /* no room */
  }
}

// What was typed and not sent yet is kept for its conversation until the tab is closed, and so are its pictures.
export const keepDraft = (id, text) => keepForTab(draftKey(id), text);
export const keepPictures = ({ id, pictures }) =>
  keepForTab(picturesKey(id), pictures.length ? JSON.stringify(pictures) : "");
