// Requests to this server, with the key where one is needed; nothing here names another host.

import { $ } from "./elements.js";

const KEY = "quire.key";
// Not relative to the page's own address, which may hold a password that fetch refuses.
const at = (path) => new URL(path, location.origin + location.pathname).href;
let asking = null;

// Asks for a key in a dialog; the promise is kept once it is closed.
export function askKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = $("ask-key"),
      input = $("key");
    $("key-why").textContent = why;
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem(KEY, input.value.trim());
        input.value = "";
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}

// A connection that could not be made, or that ended before its answer did; `status` and `code` are the server's.
export const isLost = (error) => error.code === "lost";

function failure(message, properties) {
  return Object.assign(new Error(message), properties);
}

async function send(path, { body, signal }) {
  const key = sessionStorage.getItem(KEY),
    headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  try {
    // Without credentials the browser shows no prompt of its own.
    return await fetch(at(path), {
      method: body ? "POST" : "GET",
      headers,
      signal,
      credentials: "omit",
      body: body && JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw failure("The server cannot be reached.", { code: "lost" });
  }
}

async function readJson(response) {
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const { status } = response;
    throw failure(`${status}: the answer is no JSON; it may come from a proxy before the server.`, { status });
  }
}

// Returns the response; asks for the key until the server takes it, unless `isQuiet`.
export async function request(path, { body, signal, isQuiet = false } = {}) {
  for (;;) {
    const hadKey = Boolean(sessionStorage.getItem(KEY)),
      response = await send(path, { body, signal });
    if (response.ok) return response;
    const { status } = response,
      { error } = await readJson(response);
    if (status === 401 && !isQuiet) {
      await askKey(hadKey ? "That key was not accepted." : "It is kept until this tab is closed.");
      continue;
    }
    throw failure(error?.message ?? `${status}: the answer names no error.`, { status, code: error?.code });
  }
}

export const getJson = async (path, options) => readJson(await request(path, options));

// Yields the events of a stream as objects.
export async function* events(response) {
  const kind = response.headers.get("content-type") ?? "";
  if (!kind.startsWith("text/event-stream")) {
    throw failure(`${response.status}: the answer is no stream but ${kind || "of no type"}.`, {
      status: response.status,
    });
  }
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
  } catch (error) {
    if (error.name === "AbortError" || error instanceof SyntaxError) throw error;
    throw failure("The connection ended.", { code: "lost" });
  } finally {
    reader.cancel().catch(() => {});
  }
}
