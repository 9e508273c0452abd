// The prefix tree: the trunk is what prompts share, a branch where they part; the more holders, the thicker.

import { count, getJson } from "./api.js";
import { colour } from "./map.js";

const LANE = 15, LABEL = 160, LETTER = 7, MAX_LANES = 40, INTERVAL_MS = 1000;
const { namespaceURI: SVG } = document.getElementById("tree");

function shape(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export class PrefixTree {
  // `ownerOf` returns the request that holds a block, by pool and block.
  constructor(svg, note, { onBlock, ownerOf }) {
    Object.assign(this, { svg, note, onBlock, ownerOf, isSeen: false, focused: null });
    new IntersectionObserver(([entry]) => { this.isSeen = entry.isIntersecting; }).observe(svg.parentElement);
    svg.addEventListener("keydown", (event) => this.press(event));
    svg.addEventListener("click", (event) => {
      const item = event.target.closest("[data-block]");
      if (item) this.choose(item);
    });
  }

  async watch() {
    // Asked for while it is on the screen only.
    if (this.isSeen && !document.hidden) {
      try { this.draw(await getJson("kv/tree", { isQuiet: true })); } catch (error) {
        this.note.textContent = error.status ? error.message : "The connection was lost.";
        if ([400, 401, 403].includes(error.status)) return;
      }
    }
    setTimeout(() => this.watch(), INTERVAL_MS);
  }

  // Keeps the first segments that have room, and gives each leaf a lane.
  arrange(segments) {
    const nodes = [], roots = [];
    let leaves = 0;
    for (const segment of segments) {
      const parent = segment.parent === null ? null : nodes[segment.parent];
      const node = { ...segment, children: [], parent };
      const isNewLeaf = !parent || parent.children.length > 0;
      if (parent === undefined || parent?.isLeftOut || (isNewLeaf && leaves === MAX_LANES)) { node.isLeftOut = true; nodes.push(node); continue; }
      leaves += isNewLeaf;
      (parent ? parent.children : roots).push(node);
      nodes.push(node);
    }
    let lane = 0;
    const settle = (node) => {
      node.level = node.parent ? node.parent.level + 1 : 1;
      const lanes = node.children.map(settle);
      node.lane = lanes.length ? (lanes[0] + lanes.at(-1)) / 2 : lane++;
      return node.lane;
    };
    roots.forEach(settle);
    return { shown: nodes.filter((node) => !node.isLeftOut), lanes: lane };
  }

  draw({ segments, is_whole: isWhole }) {
    const width = this.svg.parentElement.clientWidth;
    if (!width) return;
    const { shown, lanes } = this.arrange(segments);
    const deepest = Math.max(1, ...shown.map((node) => node.end_token));
    const room = Math.max(60, width - LABEL), x = (tokens) => 4 + (room - 8) * Math.sqrt(tokens / deepest), y = (lane) => 10 + lane * LANE;
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", Math.max(1, lanes) * LANE + 10);
    // A deep chain of segments is drawn from the trunk on, in the order of the tree.
    const items = [], add = (node) => { items.push(this.item(node, x, y, room)); node.children.forEach(add); };
    shown.filter((node) => !node.parent).forEach(add);
    const hadFocus = this.svg.contains(document.activeElement);
    this.svg.replaceChildren(...items);
    const focused = items.find((item) => item.dataset.key === this.focused) ?? items[0];
    focused?.setAttribute("tabindex", "0");
    if (hadFocus) focused?.focus({ preventScroll: true });
    const left = segments.length - shown.length;
    const hidden = isWhole && !left ? "" : "; more are left out";
    this.note.textContent = shown.length ? `${count(shown.length)} segments of up to ${count(deepest)} tokens${hidden}.` : "Nothing is published yet.";
  }

  item(node, x, y, room) {
    const from = x(node.first_token), to = Math.max(from + 3, x(node.end_token)), at = y(node.lane);
    const thick = Math.min(12, 1.5 + 2 * Math.log2(1 + node.holders));
    const start = node.parent ? y(node.parent.lane) : at, bend = Math.min(10, (to - from) / 2);
    const line = start === at ? `M${from} ${at}H${to}` : `M${from} ${start}C${from + bend} ${start} ${from} ${at} ${from + bend} ${at}H${to}`;
    const owner = node.holders === 1 && node.pool !== null ? this.ownerOf(node.pool, node.block) : 0;
    const kind = node.holders ? "held" : node.pool === null ? "gone" : "kept";
    const path = shape("path", { d: line, "stroke-width": thick, class: kind });
    if (owner) path.style.stroke = colour(owner);
    const state = node.holders ? `${count(node.holders)} holder${node.holders > 1 ? "s" : ""}` : node.pool === null ? "evicted" : "idle";
    const branches = node.num_children ? `, ${count(node.num_children)} branches` : "", begins = node.text ? `: ${node.text}` : "";
    const text = `Tokens ${count(node.first_token)} to ${count(node.end_token)}, ${state}${branches}${begins}`;
    const item = shape("g", { role: "treeitem", tabindex: "-1", "aria-label": text, "aria-level": node.level }, shape("title", {}), path);
    item.firstChild.textContent = text;
    Object.assign(item.dataset, { block: node.block, pool: node.pool ?? "", key: `${node.pool}.${node.block}.${node.first_token}` });
    const isLeaf = !node.children.length, letters = isLeaf ? 22 : Math.floor((to - from) / LETTER);
    if (isLeaf || !node.parent) {
      const label = shape("text", isLeaf ? { x: Math.min(to, room) + 8, y: at + 4 } : { x: from, y: at - 9 });
      label.textContent = (node.text ?? "").trim().replace(/\s+/g, " ").slice(0, letters);
      item.append(label);
    }
    return item;
  }

  choose(item) {
    if (item.dataset.pool) this.onBlock(Number(item.dataset.pool), Number(item.dataset.block));
  }

  press(event) {
    const items = [...this.svg.children], at = items.indexOf(document.activeElement);
    if (event.key === "Enter" && at >= 0) this.choose(items[at]);
    const move = { ArrowUp: -1, ArrowLeft: -1, ArrowDown: 1, ArrowRight: 1 }[event.key], next = items[at + move];
    if (!move) return;
    event.preventDefault();
    if (!next) return;
    items[at]?.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    this.focused = next.dataset.key;
    next.focus();
  }
}
