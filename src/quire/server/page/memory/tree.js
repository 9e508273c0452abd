// The prefix tree: the trunk is what prompts share, a branch where they part; the more holders, the thicker.
//
// Each leaf has a lane, with its text at the right end of its line; a trunk that branches has a lane above them for its
// text alone. So no line and no text meets another text.

import { getJson } from "../base/api.js";
import { $ } from "../base/elements.js";
import { count, plural } from "../base/words.js";
import { colour } from "./map.js";

const LANE = 15,
  LABEL = 172,
  LETTER = 7,
  MAX_LANES = 40,
  INTERVAL_MS = 1000;
// So many idle prompts that share nothing with others are drawn one by one.
const MAX_ALONE = 2;
const { namespaceURI: SVG } = $("tree");

function shape(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const keyOf = (node) => `${node.pool}.${node.block}.${node.first_token}`;
// Whether nobody holds a prompt, and no other one branches off it.
const isAlone = (node) => !node.holders && node.num_children <= 1 && node.children.every(isAlone);
const tidy = (text) => (text ?? "").trim().replace(/\s+/g, " ");

export class PrefixTree {
  // `alone` is the button that folds the prompts that share nothing; `ownerOf` returns the request that holds a block,
  // by pool and block.
  constructor(svg, note, alone, { onBlock, ownerOf }) {
    Object.assign(this, {
      svg,
      note,
      alone,
      onBlock,
      ownerOf,
      isSeen: false,
      focused: null,
      isUnfolded: false,
      used: new Map(),
    });
    new IntersectionObserver(([entry]) => {
      this.isSeen = entry.isIntersecting;
    }).observe(svg.parentElement);
    svg.addEventListener("keydown", (event) => this.press(event));
    svg.addEventListener("click", (event) => {
      const item = event.target.closest("[data-block]");
      if (item) this.choose(item);
    });
    alone.addEventListener("click", () => {
      this.isUnfolded = !this.isUnfolded;
      this.draw(this.shown);
    });
  }

  async watch() {
    // Asked for while it is on the screen only.
    if (this.isSeen && !document.hidden) {
      try {
        this.draw(await getJson("kv/tree", { isQuiet: true }));
      } catch (error) {
        if ([400, 401, 403].includes(error.status)) return;
      }
    }
    setTimeout(() => this.watch(), INTERVAL_MS);
  }

  // The first segments of prompts, the last used ones first. The server names them by holders, then the newest first;
  // when each was held last, this page has seen.
  byLastUse(roots) {
    const now = performance.now(),
      used = new Map();
    for (const root of roots) {
      const key = keyOf(root),
        before = this.used.get(key),
        size = root.end_token + root.num_children;
      const isUsed = root.holders || (before && before.size !== size) || (!before && this.used.size);
      used.set(key, { size, at: isUsed ? now : (before?.at ?? 0) });
    }
    this.used = used;
    return roots.toSorted((one, other) => used.get(keyOf(other)).at - used.get(keyOf(one)).at);
  }

  // Keeps the first segments that have room, and gives each leaf a lane.
  arrange(segments) {
    const nodes = segments.map((segment) => ({ ...segment, children: [] }));
    for (const node of nodes) {
      node.parent = node.parent === null ? null : nodes[node.parent];
      node.parent?.children.push(node);
    }
    const all = this.byLastUse(nodes.filter((node) => !node.parent)),
      alone = all.filter(isAlone);
    const isFolded = alone.length > MAX_ALONE && !this.isUnfolded;
    const roots = isFolded ? all.filter((node) => !isAlone(node)) : all,
      shown = [];
    let lane = 0;
    const settle = (node, level) => {
      Object.assign(node, { level, isBranching: node.children.length > 1 });
      if (level === 1 && node.isBranching) {
        node.labelLane = lane;
        lane += 1;
      }
      shown.push(node);
      const lanes = [];
      for (const child of node.children) if (lane < MAX_LANES) lanes.push(settle(child, level + 1));
      node.hasShownChildren = lanes.length > 0;
      node.lane = lanes.length ? (lanes[0] + lanes.at(-1)) / 2 : lane++;
      return node.lane;
    };
    for (const root of roots) if (lane < MAX_LANES) settle(root, 1);
    const numFolded = isFolded ? alone.length : 0;
    return { shown, lanes: lane, numAlone: alone.length, numLeft: segments.length - shown.length - numFolded };
  }

  draw(tree) {
    const { segments, is_whole: isWhole } = (this.shown = tree),
      width = this.svg.parentElement.clientWidth;
    if (!width) return;
    const { shown, lanes, numAlone, numLeft } = this.arrange(segments),
      deepest = Math.max(1, ...shown.map((node) => node.end_token));
    const room = Math.max(60, width - LABEL),
      letters = Math.floor((width - 8) / LETTER);
    const place = {
      x: (tokens) => 4 + (room - 8) * Math.sqrt(tokens / deepest),
      y: (lane) => 10 + lane * LANE,
      width,
      letters,
    };
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", lanes ? lanes * LANE + 10 : 0);
    const items = shown.map((node) => this.item(node, place)),
      hadFocus = this.svg.contains(document.activeElement);
    this.svg.replaceChildren(...items);
    const focused = items.find((item) => item.dataset.key === this.focused) ?? items[0];
    focused?.setAttribute("tabindex", "0");
    if (hadFocus) focused?.focus({ preventScroll: true });
    this.alone.hidden = numAlone <= MAX_ALONE;
    this.alone.setAttribute("aria-expanded", String(this.isUnfolded));
    const act = this.isUnfolded ? "Fold" : "Show";
    this.alone.textContent = `${act} ${plural(numAlone, "idle prompt")} that share nothing`;
    const hidden = isWhole && !numLeft ? "" : "; more are left out";
    this.note.textContent = segments.length
      ? `${plural(segments.length, "segment")} of up to ${plural(deepest, "token")}${hidden}.`
      : "Nothing is published yet.";
  }

  item(node, { x, y, width, letters }) {
    const from = x(node.first_token),
      to = Math.max(from + 3, x(node.end_token)),
      at = y(node.lane);
    const thick = Math.min(12, 1.5 + 2 * Math.log2(1 + node.holders));
    const start = node.parent ? y(node.parent.lane) : at,
      bend = Math.min(10, (to - from) / 2);
    const line =
      start === at
        ? `M${from} ${at}H${to}`
        : `M${from} ${start}C${from + bend} ${start} ${from} ${at} ${from + bend} ${at}H${to}`;
    const owner = node.holders === 1 && node.pool !== null ? this.ownerOf(node.pool, node.block) : 0;
    const kind = node.holders ? "held" : node.pool === null ? "gone" : "kept";
    const path = shape("path", { d: line, "stroke-width": thick, class: kind });
    if (owner) path.style.stroke = colour(owner);
    const state = node.holders ? plural(node.holders, "holder") : node.pool === null ? "evicted" : "idle";
    const branches = node.num_children ? `, ${count(node.num_children)} branches` : "",
      begins = node.text ? `: ${node.text}` : "";
    const text = `Tokens ${count(node.first_token)} to ${count(node.end_token)}, ${state}${branches}${begins}`;
    const attributes = { role: "treeitem", tabindex: "-1", "aria-label": text, "aria-level": node.level };
    const item = shape("g", attributes, shape("title", {}), path);
    item.firstChild.textContent = text;
    Object.assign(item.dataset, { block: node.block, pool: node.pool ?? "", key: keyOf(node) });
    if (node.labelLane !== undefined) {
      item.append(this.label(4, y(node.labelLane) + 4, tidy(node.text), letters));
    } else if (!node.hasShownChildren) {
      const left = to + thick / 2 + 5;
      item.append(this.label(left, at + 4, labelOf(node), Math.floor((width - left) / LETTER)));
    }
    return item;
  }

  label(x, y, text, letters) {
    const element = shape("text", { x, y });
    element.textContent = text.length > letters ? `${text.slice(0, Math.max(0, letters - 1))}\u2026` : text;
    return element;
  }

  choose(item) {
    if (item.dataset.pool) this.onBlock(Number(item.dataset.pool), Number(item.dataset.block));
  }

  press(event) {
    const items = [...this.svg.children],
      at = items.indexOf(document.activeElement);
    if (event.key === "Enter" && at >= 0) this.choose(items[at]);
    const move = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key],
      next = items[at + move];
    if (!move) return;
    event.preventDefault();
    if (!next) return;
    items[at]?.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    this.focused = next.dataset.key;
    next.focus();
  }
}

// The text of a leaf, behind that of what leads to it without a branch.
function labelOf(node) {
  const texts = [tidy(node.text)];
  for (let at = node.parent; at && !at.isBranching; at = at.parent) texts.unshift(tidy(at.text));
  return texts.filter(Boolean).join(" \u2026 ");
}
