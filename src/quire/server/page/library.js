// The list of the conversations: search, new, delete, and files of them.

import { make } from "./api.js";
import * as store from "./conversations.js";

const $ = (id) => document.getElementById(id);

function download(name, text) {
  const link = make("a", { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export class Library {
  // `onOpen` is called with the conversation to show, whatever runs.
  constructor(onOpen) {
    Object.assign(this, { onOpen, all: store.load(), shown: null });
    $("conversations").addEventListener("change", () => this.open(this.all.find((each) => each.id === $("conversations").value) ?? this.shown));
    $("new").addEventListener("click", () => { this.open(store.create()); $("input").focus(); });
    $("delete").addEventListener("click", () => {
      store.remove(this.shown);
      this.all = this.all.filter((each) => each !== this.shown);
      this.open(this.all[0] ?? store.create());
    });
    $("search").addEventListener("input", () => this.list());
    $("export").addEventListener("click", () => download("conversation.json", store.toFile([this.shown])));
    $("export-all").addEventListener("click", () => download("conversations.json", store.toFile(this.all)));
    $("import").addEventListener("change", () => this.read());
  }

  async read() {
    const [file] = $("import").files;
    $("import").value = "";
    if (!file) return;
    try {
      const found = store.fromFile(await file.text());
      for (const each of found) this.keep(each);
      this.open(found[0]);
      this.say(`${found.length} conversation${found.length > 1 ? "s were" : " was"} imported.`);
    } catch (error) { this.say(error.message); }
  }

  say(text) { $("library-note").textContent = text; }

  open(conversation) {
    this.shown = conversation;
    this.list();
    this.onOpen(conversation);
  }

  keep(conversation) {
    if (!this.all.includes(conversation)) this.all.unshift(conversation);
    if (!store.save(conversation)) this.say("The browser has no room to keep this conversation.");
    this.list();
  }

  list() {
    const query = $("search").value, found = store.search(this.all, query);
    const listed = found.includes(this.shown) ? found : [this.shown, ...found];
    $("conversations").replaceChildren(...listed.map((each) => make("option", { value: each.id, textContent: each.title })));
    $("conversations").value = this.shown.id;
    if (query.trim()) this.say(`${found.length} of ${this.all.length} conversations match.`);
  }
}
