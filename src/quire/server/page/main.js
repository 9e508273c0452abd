// The page: the chat, and beside it the memory.

import { count, getJson, request } from "./api.js";
import { startChat } from "./chat.js";
import { startMemory } from "./memory.js";

const $ = (id) => document.getElementById(id);

for (const tab of ["chat", "memory"]) {
  $(`show-${tab}`).addEventListener("click", () => {
    document.body.dataset.tab = tab;
    for (const other of ["chat", "memory"]) $(`show-${other}`).setAttribute("aria-pressed", String(other === tab));
    dispatchEvent(new Event("resize"));
  });
}

async function checkHealth() {
  try {
    const state = (await (await fetch(new URL("health", location.origin + location.pathname))).json()).status;
    $("dot").className = `dot ${state === "ok" ? "ok" : "bad"}`;
    $("state").textContent = state === "ok" ? "healthy" : state;
  } catch {
    $("dot").className = "dot bad";
    $("state").textContent = "not reachable";
  }
  setTimeout(checkHealth, document.hidden ? 15000 : 3000);
}

async function start() {
  checkHealth();
  let status = null;
  try {
    // Asks for the key where one is needed.
    const models = await getJson("v1/models");
    $("facts").textContent = models.data[0].id;
    document.title = `${models.data[0].id} \u00b7 Quire`;
    status = await (await request("status", { isQuiet: true })).json();
    $("facts").textContent = `${status.model} on ${status.device}, context of ${count(status.max_model_len)} tokens, version ${status.version}`;
  } catch (error) {
    // The chat needs no operator's key; see memory.js for what the map says then.
    if (!error.status) { setTimeout(start, 2000); return; }
  }
  startMemory(status);
  startChat(status);
}

start();
