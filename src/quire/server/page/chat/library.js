// The list of the conversations: search, new, rename, delete with undo, and files of them.

import { $, make, say } from "../base/elements.js";
import { plural } from "../base/words.js";
import { create, cutTitle, search, take } from "./conversations.js";
import { pack, sweep, unpack } from "./pictures.js";
import * as storage from "./storage.js";

const MAX_ROWS = 300,
  DAY_MS = 86_400_000;

async function download(name, conversations) {
  const text = storage.toFile(await pack(conversations));
  const link = make("a", { download: name });
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function ageOf({ changed }) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (changed >= midnight) return "Today";
  if (changed >= midnight - DAY_MS) return "Yesterday";
  return changed >= midnight - 7 * DAY_MS ? "Last seven days" : "Earlier";
}

function icon(glyph, about, onClick) {
  const element = make("button", { type: "button", className: "icon", textContent: glyph, title: about });
  element.setAttribute("aria-label", about);
  element.addEventListener("click", onClick);
  return element;
}

export class Library {
  // `onOpen` is called with the conversation to show, `onChange` where another tab changed the shown one; `isBusy`
  // tells whether an answer is being written into a conversation.
  constructor({ onOpen, onChange, isBusy }) {
    Object.assign(this, { onOpen, onChange, isBusy, all: storage.load(), shown: null });
    $("new").addEventListener("click", () => this.openNew());
    $("search").addEventListener("input", () => this.list());
    $("search").addEventListener("keydown", (event) => this.press(event));
    $("conversations").addEventListener("keydown", (event) => this.press(event));
    $("export-all").addEventListener("click", () => download("conversations.json", this.all));
    $("import").addEventListener("change", () => this.read());
    const pictures = this.all.flatMap(({ messages }) => messages.flatMap((message) => message.pictures ?? []));
    sweep(new Set(pictures.map(({ id }) => id)));
    storage.watch({
      onHead: (head) => this.takeHead(head),
      onMessage: (id, message) => this.takeMessage(id, message),
      onRemove: (id) => this.takeRemoval(id),
    });
  }

  openNew() {
    // One that nothing was said in yet is as good as another.
    this.open(this.shown && !this.shown.messages.length ? this.shown : create());
    this.close();
    $("input").focus();
  }

  async read() {
    const [file] = $("import").files;
    $("import").value = "";
    if (!file) return;
    try {
      const found = await unpack(storage.fromFile(await file.text()));
      for (const conversation of found) this.keep(conversation);
      this.open(found[0]);
      this.note(`${plural(found.length, "conversation")} imported.`);
    } catch (error) {
      this.note(error.message);
    }
  }

  note(text) {
    $("library-note").textContent = text;
  }

  // On narrow windows the list is a drawer.
  close() {
    document.body.classList.remove("with-library");
    $("show-library").setAttribute("aria-expanded", "false");
  }

  open(conversation) {
    this.shown = conversation;
    this.list();
    this.onOpen(conversation);
  }

  // Writes messages of a conversation, all where none are named.
  keep(conversation, messages) {
    if (!this.all.includes(conversation)) this.all.unshift(conversation);
    if (!storage.save(conversation, messages)) {
      say("The browser has no room left: what is new is kept until the page is closed. Export it, or delete others.");
    }
    this.list();
  }

  remove(conversation) {
    const wasShown = conversation === this.shown,
      at = this.all.indexOf(conversation);
    storage.remove(conversation);
    this.all = this.all.filter((each) => each !== conversation);
    if (wasShown) this.open(this.all[Math.min(at, this.all.length - 1)] ?? create());
    else this.list();
    say(`\u201c${conversation.title}\u201d was deleted.`, "Undo", () => this.restore(conversation, wasShown));
  }

  restore(conversation, isShown) {
    this.keep(conversation);
    this.all.sort((one, other) => other.changed - one.changed);
    if (isShown) this.open(conversation);
    else this.list();
  }

  rename(conversation, row) {
    const box = make("input", { value: conversation.title, maxLength: 60 });
    box.setAttribute("aria-label", "Title");
    let isOver = false;
    const end = (isKept) => {
      if (isOver) return;
      isOver = true;
      if (isKept && box.value.trim()) {
        conversation.title = cutTitle(box.value);
        this.keep(conversation, []);
      } else this.list();
      this.focusShown();
    };
    box.addEventListener("keydown", (event) => {
      if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
      event.stopPropagation();
      end(event.key === "Enter");
    });
    box.addEventListener("blur", () => end(true));
    row.replaceChildren(box);
    box.select();
  }

  focusShown() {
    $("conversations").querySelector("[aria-current]")?.focus();
  }

  // ---- what other tabs did ----

  byId(id) {
    return this.all.find((each) => each.id === id);
  }

  takeHead(head) {
    const known = this.byId(head.id);
    if (!known) this.all.unshift({ ...head, messages: [] });
    else
      Object.assign(known, {
        title: head.title,
        changed: head.changed,
        leaf: known === this.shown ? known.leaf : head.leaf,
      });
    this.list();
  }

  takeMessage(id, message) {
    if (!this.byId(id)) this.all.unshift({ ...create(), id });
    const conversation = this.byId(id);
    take(conversation, message);
    if (conversation === this.shown) this.onChange(conversation);
  }

  takeRemoval(id) {
    const conversation = this.byId(id);
    if (!conversation || this.isBusy(conversation)) return;
    this.all = this.all.filter((each) => each !== conversation);
    if (conversation === this.shown) this.open(this.all[0] ?? create());
    else this.list();
    say(`\u201c${conversation.title}\u201d was deleted in another tab.`, "Undo", () =>
      this.restore(conversation, false),
    );
  }

  // ---- the list ----

  list() {
    if ($("conversations").contains(document.activeElement) && document.activeElement.tagName === "INPUT") return;
    const query = $("search").value.trim(),
      found = search(this.all, query),
      rows = [];
    let age = null;
    for (const { conversation, passage } of found.slice(0, MAX_ROWS)) {
      if (!query && ageOf(conversation) !== age) {
        age = ageOf(conversation);
        rows.push(make("li", { className: "age", textContent: age }));
      }
      rows.push(this.row(conversation, passage));
    }
    const focused = document.activeElement?.closest("#conversations li")?.dataset.id;
    $("conversations").replaceChildren(...rows);
    if (focused) $("conversations").querySelector(`[data-id="${focused}"] button`)?.focus();
    const cut = found.length > MAX_ROWS ? ` The first ${MAX_ROWS} are listed.` : "";
    this.note(query ? `${found.length} of ${plural(this.all.length, "conversation")} match.${cut}` : cut.trim());
    $("export-all").disabled = !this.all.length;
  }

  row(conversation, passage) {
    const title = make("button", { type: "button", className: "title", title: conversation.title }, conversation.title);
    if (passage) title.append(make("small", { textContent: passage }));
    const row = make("li", {}, title);
    row.dataset.id = conversation.id;
    if (conversation === this.shown) title.setAttribute("aria-current", "true");
    row.classList.toggle("busy", this.isBusy(conversation));
    title.addEventListener("click", () => {
      this.open(conversation);
      this.close();
    });
    row.append(
      make(
        "span",
        { className: "row-tools" },
        icon("\u270e", `Rename ${conversation.title}`, () => this.rename(conversation, row)),
        icon("\u2913", `Export ${conversation.title}`, () => download("conversation.json", [conversation])),
        icon("\u2715", `Delete ${conversation.title}`, () => {
          this.remove(conversation);
          this.focusShown();
        }),
      ),
    );
    return row;
  }

  // Arrows move between the search and the titles, Enter opens the first match.
  press(event) {
    const titles = [...$("conversations").querySelectorAll(".title")],
      stops = [$("search"), ...titles];
    if (event.key === "Enter" && event.target === $("search")) titles[0]?.click();
    if (event.key === "Escape" && event.target === $("search")) {
      if ($("search").value) {
        $("search").value = "";
        this.list();
      } else {
        this.close();
        $("input").focus();
      }
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key],
      next = step && stops[stops.indexOf(event.target) + step];
    if (!next || (event.target.tagName === "INPUT" && event.target !== $("search"))) return;
    event.preventDefault();
    next.focus();
  }
}
