// Requests to this server, with the key where one is needed; nothing here names another host.

const KEY = "quire.key";
// Not relative to the page's own address, which may hold a password that fetch refuses.
const at = (path) => new URL(path, location.origin + location.pathname).href;
let asking = null;

// Asks for a key in a dialog; the promise is kept once it is closed.
export function askKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-key"), input = document.getElementById("key");
    document.getElementById("key-why").textContent = why;
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, input.value.trim());
      input.value = "";
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

// Returns the response; asks for the key until the server takes it, unless `isQuiet`.
export async function request(path, { body, signal, isQuiet = false } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY), headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body) headers["Content-Type"] = "application/json";
    // Without credentials the browser shows no prompt of its own.
    const response = await fetch(at(path), {
      method: body ? "POST" : "GET", headers, signal, credentials: "omit", body: body && JSON.stringify(body),
    });
    if (response.ok) return response;
    const error = (await response.json()).error;
    if (response.status === 401 && !isQuiet) {
      await askKey(key ? "That key was not accepted." : "It is kept until this tab is closed.");
      continue;
    }
    throw Object.assign(new Error(error.message), { status: response.status, code: error.code });
  }
}

export const getJson = async (path, options) => (await request(path, options)).json();

// Yields the events of a stream as objects.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) if (part.startsWith("data: {")) yield JSON.parse(part.slice(6));
    }
  } finally { reader.cancel().catch(() => {}); }
}

export const count = (number) => number.toLocaleString("en");

export function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}
