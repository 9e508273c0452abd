// Conversations, kept in this browser: trees of messages, of which one path is shown.

const PREFIX = "quire.conversation.";
const UNNAMED = "New conversation";
const ROLES = ["user", "assistant", "tool"];

export function load() {
  const found = [];
  for (const key of Object.keys(localStorage)) {
    if (!key.startsWith(PREFIX)) continue;
    try { found.push(JSON.parse(localStorage.getItem(key))); } catch { localStorage.removeItem(key); }
  }
  return found.sort((one, other) => other.changed - one.changed);
}

const newId = () => crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;

export const create = () => ({ id: newId(), changed: Date.now(), title: UNNAMED, messages: [], leaf: null });

// Returns false where the browser has no room.
export function save(conversation) {
  conversation.changed = Date.now();
  try { localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation)); return true; } catch { return false; }
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);

// Adds a message behind another one (null: at the start) and shows it.
export function add(conversation, parent, role, content, more = {}) {
  const message = { id: conversation.messages.length, parent, role, content, ...more };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  if (role === "user" && conversation.title === UNNAMED) conversation.title = content.trim().slice(0, 60);
  return message;
}

export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let id = leaf; id !== null; id = conversation.messages[id].parent) found.unshift(conversation.messages[id]);
  return found;
}

export const siblings = (conversation, message) =>
  conversation.messages.filter((other) => other.parent === message.parent && other.role === message.role);

// The samples of one answer, side by side; only the message itself where there was one.
export const samplesOf = (conversation, message) =>
  (message.batch === undefined ? [message] : conversation.messages.filter((other) => other.batch === message.batch));

// Shows another branch, as far as it goes.
export function follow(conversation, message) {
  let leaf = message.id;
  for (let next; (next = conversation.messages.findLast((other) => other.parent === leaf));) leaf = next.id;
  conversation.leaf = leaf;
}

// The conversations with all words of a query in their titles or messages.
export function search(all, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const textOf = (each) => [each.title, ...each.messages.map((message) => message.content)].join("\n").toLowerCase();
  return words.length ? all.filter((each) => { const text = textOf(each); return words.every((word) => text.includes(word)); }) : all;
}

export const toFile = (conversations) => JSON.stringify({ format: "quire.conversations", version: 1, conversations }, null, 2);

// Reads a file of `toFile`; throws an error that says what is wrong with it.
export function fromFile(text) {
  let found;
  try { found = JSON.parse(text); } catch (error) { throw new Error(`The file is not JSON: ${error.message}`); }
  const listed = Array.isArray(found?.conversations) ? found.conversations : [found];
  if (!listed.length) throw new Error("The file has no conversations.");
  return listed.map((each, at) => {
    const { messages, title, leaf } = each ?? {};
    const isMessage = (message, id) => message && message.id === id && ROLES.includes(message.role) && typeof message.content === "string"
      && (message.parent === null || (Number.isInteger(message.parent) && message.parent >= 0 && message.parent < id));
    if (!Array.isArray(messages) || !messages.every(isMessage)) throw new Error(`Conversation ${at + 1} of the file has no messages of this page.`);
    const isLeaf = Number.isInteger(leaf) && leaf >= 0 && leaf < messages.length;
    // An id of its own, so that nothing that is there is overwritten.
    const last = messages.length ? messages.length - 1 : null;
    return { ...create(), title: typeof title === "string" ? title.slice(0, 60) : UNNAMED, messages, leaf: isLeaf ? leaf : last };
  });
}
