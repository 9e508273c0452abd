// The memory: the live map of the blocks, the requests, the prefix tree and the charts.

import { askKey, events, getJson, request } from "../base/api.js";
import { $, make } from "../base/elements.js";
import { count, plural, size, timeOf } from "../base/words.js";
import { addSample, drawCharts } from "./charts.js";
import { sharing, showBlock, showRequest } from "./detail.js";
import { startFill } from "./fill.js";
import { BlockMap, colour } from "./map.js";
import { Timeline } from "./timeline.js";
import { PrefixTree } from "./tree.js";

const MAX_ROWS = 40,
  RETRY_MS = 2000;
let map = null,
  timeline = null,
  last = null,
  before = null,
  lit = null,
  lostAt = null;

const open = (number) => showRequest(number, timeline.describe(number));

export function startMemory(status) {
  map = new BlockMap($("map"), { onBlock: showBlock, onMove: tellCell, onPoint: tip });
  timeline = new Timeline($("timeline"), $("timeline-note"), open);
  const ownerOf = (pool, block) => (map.pools?.[pool] ? map.owners[map.pools[pool].first + block] : 0);
  const tree = new PrefixTree($("tree"), $("tree-note"), $("tree-alone"), { onBlock: showBlock, ownerOf });
  for (const [id, factor] of [
    ["zoom-out", 1 / 1.5],
    ["zoom-fit", null],
    ["zoom-in", 1.5],
  ]) {
    $(id).addEventListener("click", () => map.scale(factor));
  }
  $("use-key").addEventListener("click", async () => {
    await askKey("The routes of operation need the operator's key.");
    lock(null);
    watch();
    tree.watch();
  });
  setInterval(() => {
    if (!last || document.hidden || lostAt) return;
    addSample(last);
    drawCharts($("charts"));
    timeline.draw();
  }, 1000);
  startFill(status);
  tree.watch();
  watch();
}

// Folds the memory to one line that says why it is not shown; null unfolds it.
function lock(why) {
  document.body.classList.toggle("locked", why !== null);
  $("locked").hidden = why === null;
  $("locked-why").textContent = why ?? "";
  $("memory").classList.remove("stale");
}

// Greys what is shown once the connection was lost, and says since when; null ends that.
function showLost(at) {
  lostAt = at;
  $("memory").classList.toggle("stale", Boolean(at && last));
  $("stale").hidden = !at;
  if (at)
    $("stale").textContent = `The connection was lost at ${timeOf(at)}.${last ? " What is shown is from then." : ""}`;
}

async function watch() {
  // A page that nobody sees costs the server nothing.
  const unseen = new AbortController(),
    hide = () => {
      if (document.hidden) unseen.abort();
    };
  document.addEventListener("visibilitychange", hide);
  try {
    const response = await request("kv/map", { isQuiet: true, signal: unseen.signal });
    for await (const event of events(response)) {
      if (lostAt) showLost(null);
      if (event.layout) map.layout(event.layout);
      map.disk = event.disk_blocks ?? 0;
      map.update(event.runs);
      map.flash(event.recent);
      last = event;
      show(event);
    }
    if (!lostAt) showLost(new Date());
  } catch (error) {
    if ([400, 401, 403].includes(error.status)) {
      lock(`The memory is not shown: ${error.message}.`.replace(/\.+$/, "."));
      $("use-key").hidden = error.status === 400;
      return;
    }
    if (!unseen.signal.aborted && !lostAt) showLost(new Date());
  } finally {
    document.removeEventListener("visibilitychange", hide);
  }
  if (document.hidden) document.addEventListener("visibilitychange", watch, { once: true });
  else setTimeout(watch, unseen.signal.aborted ? 0 : RETRY_MS);
}

// A cell in words, for those who point at it or move to it.
function wordsOf({ pool, block, holders, isPublished, isPinned, isMedia, owner }) {
  const first = owner ? `#${owner}` : "others",
    more = holders > 1 ? ` and ${count(holders - 1)} more` : "";
  const state = holders ? `held by ${first}${more}` : isPublished ? "idle" : "free";
  const kept = holders && isPublished ? ", published" : "";
  const rest = `${isPinned ? ", pinned" : ""}${isMedia ? ", has rows of an image" : ""}`;
  return `${pool.tier} block ${count(block)}: ${state}${kept}${rest}`;
}

function tellCell(cell) {
  $("announce-memory").textContent = wordsOf(cell);
}

function tip(cell, x, y) {
  const box = $("map-tip");
  box.hidden = !cell;
  if (!cell) return;
  box.textContent = wordsOf(cell);
  box.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${y + 18 + box.offsetHeight > innerHeight ? y - 10 - box.offsetHeight : y + 18}px`;
}

const HAPPENED = [
  ["num_copies", "copied on write"],
  ["num_merges", "merged as duplicates"],
  ["num_evictions", "evicted"],
];

function show(event) {
  const { usage, host, queue } = event,
    { block_size: tokens, bytes_per_block: bytes } = map.info;
  $("size").textContent =
    `${plural(usage.num_blocks, "block")} of ${plural(tokens, "token")}, ${size(usage.num_blocks * bytes)}`;
  const parts = [`${count(usage.used)} used`, `${count(usage.idle)} idle`, `${count(usage.free)} free`];
  if (host) parts.push(`host: ${count(host.used)} used, ${count(host.idle)} idle, ${count(host.free)} free`);
  if (event.disk_blocks !== null) parts.push(`disk: ${count(event.disk_blocks)}`);
  $("counts").textContent = parts.join(" \u00b7 ");
  $("map").setAttribute("aria-label", `Map of the KV blocks: ${parts.join(", ")}`);
  const happened = HAPPENED.map(([name, text]) => [usage[name] - (before?.[name] ?? usage[name]), text])
    .filter(([number]) => number > 0)
    .map(([number, text]) => `${plural(number, "block")} ${text}`);
  if (happened.length) $("news").textContent = `Just now: ${happened.join(", ")}.`;
  before = usage;
  $("queue").textContent =
    `${count(queue.running)} running, ${count(queue.waiting)} queued, ${count(queue.swapped)} swapped`;
  timeline.record(event.requests);
  showRequests(event.requests);
}

const NAMES = { waiting: "queued" };

function showRequests(requests) {
  const body = $("requests").tBodies[0],
    rows = new Map([...body.rows].map((row) => [Number(row.dataset.number), row]));
  const listed = requests.slice(0, MAX_ROWS);
  const wanted = listed.map((each) => {
    const row = rows.get(each.number) ?? makeRow(each),
      name = NAMES[each.status] ?? each.status;
    const state = each.num_preemptions ? `${name}, ${each.num_preemptions}\u00d7 preempted` : name;
    const values = [state, each.num_prompt, each.num_cached ?? "\u2013", each.num_output, each.num_blocks];
    values.forEach((value, idx) => {
      const text = typeof value === "number" ? count(value) : value,
        cell = row.cells[idx + 1];
      if (cell.textContent !== text) cell.textContent = text;
    });
    return row;
  });
  // Rows stay the same elements, so that a focused or hovered one stays so.
  for (const row of body.rows) if (!wanted.includes(row)) row.remove();
  for (const row of wanted) if (row.parentNode !== body) body.append(row);
  if (lit !== null && !listed.some((each) => each.number === lit)) light(null);
  $("requests").hidden = !requests.length;
  $("nothing").hidden = requests.length > 0;
}

async function light(number) {
  lit = number;
  map.light(number);
  for (const row of $("requests").tBodies[0].rows) row.classList.toggle("lit", Number(row.dataset.number) === number);
  if (number === null) return;
  // Shared blocks show the colour of another request: the table says which they are.
  const found = await getJson(`kv/request?number=${number}`).catch(() => null);
  if (found && lit === number) map.light(number, found.samples);
}

function makeRow({ number, request_id: name }) {
  const row = make("tr"),
    mark = make("i");
  mark.style.background = colour(number);
  const button = make("button", { type: "button", className: "quiet", textContent: `#${number}`, title: name });
  row.dataset.number = number;
  row.append(make("td", {}, mark, button), ...[1, 2, 3, 4, 5].map(() => make("td")));
  for (const [on, off] of [
    ["mouseenter", "mouseleave"],
    ["focusin", "focusout"],
  ]) {
    row.addEventListener(on, () => light(number));
    row.addEventListener(off, () => light(null));
  }
  button.addEventListener("click", () => open(number));
  return row;
}

// Watches how many blocks the samples of an answer share; `stop` returns the greatest numbers seen, null for none.
export function watchSharing(answerId) {
  let most = null,
    isOver = false;
  (async () => {
    while (!isOver) {
      const row = last?.requests.find((each) => each.request_id.startsWith(answerId));
      const found = row && (await getJson(`kv/request?number=${row.number}`, { isQuiet: true }).catch(() => null));
      const now = found && sharing(found.samples);
      if (now && now.entries >= (most?.entries ?? 1)) most = now;
      await new Promise((resolve) => {
        setTimeout(resolve, 150);
      });
    }
  })();
  return {
    stop: () => {
      isOver = true;
      return most;
    },
  };
}
