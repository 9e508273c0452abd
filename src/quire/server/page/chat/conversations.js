// Conversations: trees of messages, of which one path is shown.
//
// Ids of messages are the same in no two tabs, so that what two tabs add to one conversation can stand side by side.

export const UNNAMED = "New conversation";
const MAX_TITLE = 60;

export const newId = () => crypto.randomUUID?.() ?? `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

export const create = () => ({ id: newId(), changed: Date.now(), title: UNNAMED, messages: [], leaf: null });

export const cutTitle = (text) => text.trim().replace(/\s+/g, " ").slice(0, MAX_TITLE);

// Adds a message behind another one (null: at the start) and shows it.
export function add(conversation, parent, role, content, more = {}) {
  // Later than those before, even within a millisecond: messages are sorted by it.
  const made = Math.max(Date.now(), ...conversation.messages.map((each) => each.made + 1)),
    message = { id: newId(), parent, role, content, made, ...more };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  conversation.changed = message.made;
  if (role === "user" && conversation.title === UNNAMED) conversation.title = cutTitle(content) || UNNAMED;
  return message;
}

export const find = (conversation, id) => conversation.messages.find((message) => message.id === id);

// The messages from the first to a leaf; a message whose parent is not there is a first one.
export function path(conversation, leaf = conversation.leaf) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message])),
    found = [];
  for (let message = byId.get(leaf); message && !found.includes(message); message = byId.get(message.parent))
    found.unshift(message);
  return found;
}

export const siblings = (conversation, message) =>
  conversation.messages.filter((other) => other.parent === message.parent && other.role === message.role);

// The samples of one answer, side by side; only the message itself where there was one.
export const samplesOf = (conversation, message) =>
  message.batch === undefined ? [message] : conversation.messages.filter((other) => other.batch === message.batch);

// Shows another branch, as far as it goes.
export function follow(conversation, message) {
  let leaf = message.id;
  for (let next; (next = conversation.messages.findLast((other) => other.parent === leaf));) leaf = next.id;
  conversation.leaf = leaf;
}

// Takes in a message that another tab wrote, and shows it where it goes on from what is shown.
export function take(conversation, message) {
  const known = find(conversation, message.id);
  if (known) {
    for (const name of Object.keys(known)) delete known[name];
    Object.assign(known, message);
    return;
  }
  conversation.messages.push(message);
  conversation.messages.sort((one, other) => one.made - other.made);
  if (message.parent === conversation.leaf) conversation.leaf = message.id;
}

const AROUND = 30;

// The conversations with all words of a query in their titles or messages, each with a passage that has one.
export function search(all, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return all.map((conversation) => ({ conversation, passage: null }));
  return all.flatMap((conversation) => {
    const texts = [conversation.title, ...conversation.messages.map((message) => message.content)];
    const whole = texts.join("\n").toLowerCase();
    if (!words.every((word) => whole.includes(word))) return [];
    const text = texts.slice(1).find((each) => words.some((word) => each.toLowerCase().includes(word)));
    if (text === undefined) return [{ conversation, passage: null }];
    const at = Math.max(
      0,
      Math.min(...words.map((word) => text.toLowerCase().indexOf(word)).filter((each) => each >= 0)) - AROUND,
    );
    return [{ conversation, passage: `${at ? "\u2026" : ""}${text.slice(at, at + 3 * AROUND).replace(/\s+/g, " ")}` }];
  });
}
