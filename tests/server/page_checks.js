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
