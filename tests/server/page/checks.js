// Checks of the page in a browser: each returns what is wrong, so that an empty list is right.

const isShown = (element) => element.checkVisibility({ visibilityProperty: true }) && element.getClientRects().length > 0;
const isHidden = (element) => Boolean(element.closest(".hidden"));

function luminance([red, green, blue]) {
  const [r, g, b] = [red, green, blue].map((each) => (each / 255 <= 0.03928 ? each / 255 / 12.92 : ((each / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

const numbers = (text) => text.match(/[\d.]+/g).map(Number);

function backgroundOf(element) {
  for (let at = element; at; at = at.parentElement) {
    const [red, green, blue, alpha = 1] = numbers(getComputedStyle(at).backgroundColor);
    if (alpha === 1) return [red, green, blue];
    if (alpha > 0) throw new Error(`a background that is partly transparent: ${at.outerHTML}`);
  }
  return [255, 255, 255];
}

function contrast(ink, paper) {
  const [light, dark] = [luminance(ink), luminance(paper)].sort((one, other) => other - one);
  return (light + 0.05) / (dark + 0.05);
}

// Visible texts, and placeholders, of less contrast than WCAG's level AA asks for.
function lowContrast() {
  const found = [], check = (element, ink, what) => {
    const ratio = contrast(numbers(ink).slice(0, 3), backgroundOf(element));
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)}: ${what}`);
  };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || !isShown(element) || isHidden(element) || element.closest(":disabled, option, title")) continue;
    const style = getComputedStyle(element);
    check(element, element instanceof SVGElement ? style.fill : style.color, text.slice(0, 60));
  }
  for (const element of document.querySelectorAll("[placeholder]")) {
    if (isShown(element)) check(element, getComputedStyle(element, "::placeholder").color, element.placeholder);
  }
  return found;
}

// Controls without a name.
function nameless() {
  const isNamed = (each) => each.labels?.length || each.textContent.trim() || each.getAttribute("aria-label");
  const controls = [...document.querySelectorAll("input, textarea, select, button, canvas, summary, [tabindex], [role=treeitem]")];
  return controls.filter((each) => !isNamed(each)).map((each) => each.outerHTML);
}

// Buttons whose name lacks their text: who says "press Tokens" would not find it.
const misnamed = () => [...document.querySelectorAll("button[aria-label]")].filter((each) => /\w/.test(each.textContent)
  && !each.ariaLabel.includes(each.textContent.trim()) && each.className !== "alternative").map((each) => each.outerHTML);

// What is wider than its place: nothing may make the page scroll to the side.
function overflowing() {
  const wide = document.documentElement.scrollWidth > innerWidth ? [`the page: ${document.documentElement.scrollWidth} > ${innerWidth}`] : [];
  for (const element of document.querySelectorAll("body *")) {
    if (!isShown(element) || isHidden(element) || element.closest(".scroll, pre, #mapbox, dialog, svg")) continue;
    const { left, right } = element.getBoundingClientRect();
    if (right > innerWidth + 0.5 || left < -0.5) wide.push(`${element.tagName}#${element.id} ${left}..${right}`);
  }
  return wide;
}

// The element with the focus, and whether it can be seen that it has it.
function focused() {
  const element = document.activeElement, style = getComputedStyle(element);
  const path = element.querySelector(":scope > path"), isMarked = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  const name = element.id || element.getAttribute("aria-label") || element.textContent.trim().slice(0, 30);
  return { tag: element.tagName, name, isSeen: isMarked || Boolean(path), isShown: isShown(element) };
}

// Regions that are read aloud as they change: a stream of tokens must not be among them.
const liveRegions = () => [...document.querySelectorAll("[aria-live], [role=status], [role=alert], [role=log]")].filter((each) => each.querySelector(".message") || each.closest("#talk"))
  .map((each) => each.outerHTML.slice(0, 80));

// The elements of each text of Markdown, as HTML, without classes of the library for LaTeX.
const shown = async (url, texts) => {
  const { show } = await import(`${url}/page/chat/markdown.js`);
  return texts.map((text) => {
    const box = document.createElement("div");
    show(box, text);
    return box.innerHTML.replaceAll(/ class="tml-[a-z -]*"/g, "");
  });
};

const ELEMENTS = new Set(("a blockquote br button code div em h3 h4 h5 h6 hr input li ol p pre s span strong table tbody td"
  + " th thead tr ul").split(" "));
const ATTRIBUTES = new Set(("accent aria-label checked class columnalign depth disabled display displaystyle fence form"
  + " height href largeop lspace mathbackground mathcolor mathsize mathvariant maxsize minsize movablelimits notation rel"
  + " rowspacing rspace scriptlevel separator start stretchy style symmetric tabindex target title type voffset width")
  .split(" "));
const STYLES = "text-align|color|padding[a-z-]*|math-depth|border[a-z-]*|font-[a-z]+|width";
const STYLE = new RegExp(`^(?:(?:${STYLES}): [\\w#(), .%-]+;\\s*)*$`);
const CLASS = /^(?:address|code|code-head|comment|maths|math[a-z]+|number|quiet|scroll|string|task|tml-[a-z-]+|word)$/;

function* notAllowedIn(element) {
  const isMaths = element.namespaceURI.endsWith("MathML");
  if (!isMaths && !ELEMENTS.has(element.localName)) yield element.outerHTML;
  for (const { name, value } of element.attributes) {
    if (!ATTRIBUTES.has(name)) yield `${name}=${value}`;
    if (name === "href" && (isMaths || !/^https?:\/\/[^/]/.test(value))) yield `href=${value}`;
    if (name === "style" && !STYLE.test(value)) yield `style=${value}`;
    if (name === "class" && !value.split(" ").every((each) => CLASS.test(each))) yield `class=${value}`;
    if (name === "target" && !element.rel.includes("noopener")) yield "a link that keeps its opener";
  }
  const { width, height } = element.getBoundingClientRect();
  if (Math.max(width, height) > 20000) yield `${element.localName} of ${width} x ${height}`;
}

// Shows each text on the page, growing by `step` characters, and clicks on what it became; returns what is not allowed.
const notAllowed = async (url, texts, step = 7) => {
  const { show } = await import(`${url}/page/chat/markdown.js`), bad = new Set();
  for (const text of texts) {
    const box = document.createElement("div");
    document.getElementById("talk").append(box);
    for (let end = 1; end < text.length + step; end += step) {
      show(box, text.slice(0, end));
      for (const element of box.querySelectorAll("*")) for (const what of notAllowedIn(element)) bad.add(`${text.slice(0, 60)}: ${what}`);
    }
    for (const element of box.querySelectorAll("a, button, math *")) element.click?.();
    box.remove();
  }
  return [...bad];
};

// Labels of the prefix tree that meet a line or another label, or that are cut by the edge of the drawing.
function overprinted() {
  const svg = document.getElementById("tree"), edge = svg.getBoundingClientRect(), found = [];
  const labels = [...svg.querySelectorAll("text")].map((element) => ({ element, box: element.getBoundingClientRect() }));
  const meets = ({ left, right, top, bottom }, x, y) => x > left && x < right && y > top && y < bottom;
  labels.forEach(({ element, box }, at) => {
    const name = element.textContent;
    if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1 || box.bottom > edge.bottom + 1) {
      found.push(`${name}: cut`);
    }
    for (const other of labels.slice(at + 1)) {
      const isApart = box.right <= other.box.left || other.box.right <= box.left
        || box.bottom <= other.box.top + 2 || other.box.bottom <= box.top + 2;
      if (!isApart) found.push(`${name}: over ${other.element.textContent}`);
    }
    // The middle half of the letters, and points along each line with its thickness.
    const core = { left: box.left, right: box.right, top: box.top + box.height / 4, bottom: box.bottom - box.height / 4 };
    for (const line of svg.querySelectorAll("path")) {
      const half = Number(line.getAttribute("stroke-width")) / 2, length = line.getTotalLength();
      for (let along = 0; along <= length; along += 2) {
        const { x, y } = line.getPointAtLength(along), at = [edge.left + x, edge.top + y];
        if ([-half, 0, half].some((aside) => meets(core, at[0], at[1] + aside))) { found.push(`${name}: struck through`); break; }
      }
    }
  });
  return [...new Set(found)];
}
