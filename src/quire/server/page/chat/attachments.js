// Pictures of a message that is being written: chosen, dropped or pasted, shown small, and removable.

import { $, make, say } from "../base/elements.js";
import { dataOf, read } from "./pictures.js";

const NO_ROOM = "The browser has no room left: the picture is sent, and shown until the page is closed.";

function thumbnail(picture) {
  const { name } = picture,
    image = make("img", { alt: name ? `Picture ${name}` : "Picture" });
  dataOf(picture).then((data) => {
    if (data) image.src = data;
    else image.replaceWith(make("span", { className: "note", textContent: `${image.alt}, not kept in this browser` }));
  });
  return image;
}

// A row of pictures, small; where `onRemove` is given, each with a button that removes it.
export function row(pictures, onRemove = null) {
  const element = make("div", { className: "pictures" });
  for (const picture of pictures) {
    const image = thumbnail(picture),
      box = make("span", { className: "picture" }, image);
    // It has its room before it is loaded.
    box.style.setProperty("--ratio", picture.width / picture.height);
    if (onRemove) {
      const remove = make("button", { type: "button", className: "icon", textContent: "\u2715" });
      remove.setAttribute("aria-label", `Remove ${image.alt}`);
      remove.addEventListener("click", () => onRemove(picture));
      box.append(remove);
    }
    element.append(box);
  }
  return element;
}

const filesOf = (transfer) => [...(transfer?.files ?? [])].filter(({ type }) => type.startsWith("image/"));

export class Attachments {
  // `onChange` is called with the draft, its conversation's id and its pictures, after each change; `ready` is kept
  // once all files that were given are read.
  constructor(onChange) {
    Object.assign(this, { onChange, draft: { id: null, pictures: [] }, ready: Promise.resolve() });
  }

  // Takes pictures from now on, as the model reads them.
  start() {
    $("picture-box").hidden = false;
    $("picture").addEventListener("change", () => {
      const files = [...$("picture").files];
      $("picture").value = "";
      this.add(files);
      $("input").focus();
    });
    addEventListener("paste", (event) => {
      const files = filesOf(event.clipboardData);
      // Programs offer a picture of the text that they copy: there the text is meant.
      if (!files.length || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.add(files);
    });
    const isDragged = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
    addEventListener("dragover", (event) => {
      if (!isDragged(event)) return;
      event.preventDefault();
      $("form").classList.add("dropping");
    });
    addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) $("form").classList.remove("dropping");
    });
    addEventListener("drop", (event) => {
      $("form").classList.remove("dropping");
      if (!isDragged(event)) return;
      // Else the browser would leave the page for the file.
      event.preventDefault();
      const files = filesOf(event.dataTransfer);
      if (files.length) this.add(files);
      else say("Only pictures can be dropped here.");
    });
  }

  add(files) {
    // Another conversation may be shown once they are read.
    const { draft } = this;
    this.ready = this.ready.then(async () => {
      for (const file of files) {
        try {
          const { picture, isKept } = await read(file);
          draft.pictures.push(picture);
          this.change(draft);
          $("announce").textContent = `${file.name || "The picture"} is attached.`;
          if (!isKept) say(NO_ROOM);
        } catch (error) {
          say(error.message);
        }
      }
    });
  }

  // Shows the pictures of another draft.
  show(id, pictures) {
    this.draft = { id, pictures: [...pictures] };
    this.change(this.draft);
  }

  change(draft) {
    this.onChange(draft);
    if (draft !== this.draft) return;
    const { pictures } = draft;
    $("attached").hidden = !pictures.length;
    $("attached").replaceChildren(
      row(pictures, (picture) => {
        const at = pictures.indexOf(picture);
        pictures.splice(at, 1);
        this.change(draft);
        ($("attached").querySelectorAll("button")[Math.min(at, pictures.length - 1)] ?? $("input")).focus();
      }),
    );
  }
}
