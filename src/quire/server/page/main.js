// The page: the list of conversations, the chat, and beside it the memory.

import { getJson, request } from "./base/api.js";
import { $ } from "./base/elements.js";
import { count } from "./base/words.js";
import { startChat } from "./chat/chat.js";
import { startMemory } from "./memory/memory.js";

const TABS = ["chat", "memory"];

function show(tab) {
  document.body.dataset.tab = tab;
  for (const other of TABS) $(`show-${other}`).setAttribute("aria-pressed", String(other === tab));
  dispatchEvent(new Event("resize"));
}

// The list of conversations is a drawer where the window has no room for it beside the chat.
function showLibrary(isShown) {
  document.body.classList.toggle("with-library", isShown);
  $("show-library").setAttribute("aria-expanded", String(isShown));
}

function startViews() {
  for (const tab of TABS) $(`show-${tab}`).addEventListener("click", () => show(tab));
  $("show-library").addEventListener("click", () => {
    showLibrary(!document.body.classList.contains("with-library"));
    if (document.body.classList.contains("with-library")) $("new").focus();
  });
  addEventListener("pointerdown", ({ target }) => {
    if (!target.closest("#library, #show-library")) showLibrary(false);
  });
  addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.key.toLowerCase() !== "k") return;
    event.preventDefault();
    show("chat");
    showLibrary(true);
    $("search").focus();
    $("search").select();
  });
}

async function checkHealth() {
  try {
    const { status } = await (await fetch(new URL("health", location.origin + location.pathname))).json();
    $("dot").className = `dot ${status === "ok" ? "ok" : "bad"}`;
    $("state").textContent = status === "ok" ? "healthy" : status;
  } catch {
    $("dot").className = "dot bad";
    $("state").textContent = "not reachable";
  }
  setTimeout(checkHealth, document.hidden ? 15000 : 3000);
}

async function start() {
  let status = null,
    model = null;
  try {
    // Asks for the key where one is needed.
    [model] = (await getJson("v1/models")).data;
    $("facts").textContent = model.id;
    document.title = `${model.id} \u00b7 Quire`;
    status = await (await request("status", { isQuiet: true })).json();
    const { model: name, device, max_model_len: context, version } = status;
    $("facts").textContent = `${name} on ${device}, context of ${count(context)} tokens, version ${version}`;
  } catch (error) {
    // The chat needs no operator's key; see memory.js for what the map says then.
    if (!error.status) {
      setTimeout(start, 2000);
      return;
    }
  }
  startMemory(status);
  startChat(status, model);
}

startViews();
checkHealth();
start();
