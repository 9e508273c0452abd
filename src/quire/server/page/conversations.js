// Conversations, kept in this browser: trees of messages, of which one path is shown.

const PREFIX = "quire.conversation.";

export function load() {
  const found = [];
  for (const key of Object.keys(localStorage)) {
    if (!key.startsWith(PREFIX)) continue;
    try { found.push(JSON.parse(localStorage.getItem(key))); } catch { localStorage.removeItem(key); }
  }
  return found.sort((one, other) => other.changed - one.changed);
}

export const create = () => ({ id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, changed: Date.now(), title: "New conversation", messages: [], leaf: null });

// Returns false where the browser has no room.
export function save(conversation) {
  conversation.changed = Date.now();
  try { localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation)); return true; } catch { return false; }
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);

// Adds a message behind another one (null: at the start) and shows it.
export function add(conversation, parent, role, content) {
  const message = { id: conversation.messages.length, parent, role, content };
  conversation.messages.push(message);
  conversation.leaf = message.id;
  if (role === "user" && conversation.title === "New conversation") conversation.title = content.trim().slice(0, 60);
  return message;
}

export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let id = leaf; id !== null; id = conversation.messages[id].parent) found.unshift(conversation.messages[id]);
  return found;
}

export const siblings = (conversation, message) =>
  conversation.messages.filter((other) => other.parent === message.parent && other.role === message.role);

// Shows another branch, as far as it goes.
export function follow(conversation, message) {
  let leaf = message.id;
  for (let next; (next = conversation.messages.findLast((other) => other.parent === leaf));) leaf = next.id;
  conversation.leaf = leaf;
}
