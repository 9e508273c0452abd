// Elements: made, found, and the small controls that all parts of the page share.

export const $ = (id) => document.getElementById(id);

export function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// A button; its name for screen readers begins with its text, as those who speak commands need it.
export function button(text, about, onClick) {
  const element = make("button", { type: "button", className: "quiet", textContent: text });
  element.setAttribute("aria-label", `${text}: ${about}`);
  element.addEventListener("click", onClick);
  return element;
}

// Copies a text, where the browser allows it: without HTTPS there is no clipboard but this machine's.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    /* the older way, below */
  }
  const area = make("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

export function copyButton(about, textOf) {
  return button("Copy", about, async ({ target }) => {
    const focused = document.activeElement;
    target.textContent = (await copy(textOf())) ? "Copied" : "Not allowed";
    focused?.focus({ preventScroll: true });
    setTimeout(() => {
      target.textContent = "Copy";
    }, 1500);
  });
}

const TOAST_MS = 12000;
let hiding = null;

// Says something at the lower edge for some seconds, with one thing to do about it.
export function say(text, action = null, onAction = null) {
  clearTimeout(hiding);
  const place = $("toast"),
    hide = () => {
      place.hidden = true;
      place.replaceChildren();
    };
  place.replaceChildren(make("span", { textContent: text }));
  if (action) {
    const act = make("button", { type: "button", textContent: action });
    act.addEventListener("click", () => {
      hide();
      onAction();
    });
    place.append(act);
  }
  const close = make("button", { type: "button", className: "icon", textContent: "\u2715" });
  close.setAttribute("aria-label", "Dismiss this message");
  close.addEventListener("click", hide);
  place.append(close);
  place.hidden = false;
  // It stays as long as it is pointed at or has the focus.
  const wait = () => {
    clearTimeout(hiding);
    hiding = setTimeout(() => (place.matches(":hover, :focus-within") ? wait() : hide()), TOAST_MS);
  };
  wait();
}
