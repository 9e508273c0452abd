// The memory: the live map of the blocks, the requests, the prefix tree and the charts.

import { askKey, count, events, getJson, make, request } from "./api.js";
import { addSample, drawCharts } from "./charts.js";
import { sharing, showBlock, showRequest } from "./detail.js";
import { startFill } from "./fill.js";
import { BlockMap, colour } from "./map.js";
import { Timeline } from "./timeline.js";
import { PrefixTree } from "./tree.js";

const $ = (id) => document.getElementById(id);
const MAX_ROWS = 40;
let map = null, timeline = null, last = null, before = null, lit = null;

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (bytes >= 1024 && step < units.length - 1) { bytes /= 1024; step += 1; }
  return `${bytes.toFixed(bytes < 10 && step ? 1 : 0)} ${units[step]}`;
}

const open = (number) => showRequest(number, timeline.describe(number));

export function startMemory(status) {
  map = new BlockMap($("map"), { onBlock: showBlock, onMove: tellCell });
  timeline = new Timeline($("timeline"), $("timeline-note"), open);
  const ownerOf = (pool, block) => (map.pools?.[pool] ? map.owners[map.pools[pool].first + block] : 0);
  const tree = new PrefixTree($("tree"), $("tree-note"), { onBlock: showBlock, ownerOf });
  for (const [id, factor] of [["zoom-out", 1 / 1.5], ["zoom-fit", null], ["zoom-in", 1.5]]) {
    $(id).addEventListener("click", () => map.scale(factor));
  }
  $("use-key").addEventListener("click", async () => {
    await askKey("The routes of operation need the operator's key.");
    $("use-key").hidden = true;
    watch();
    tree.watch();
  });
  setInterval(() => {
    if (!last || document.hidden) return;
    addSample(last);
    drawCharts($("charts"));
    timeline.draw();
  }, 1000);
  startFill(status);
  tree.watch();
  watch();
}

async function watch() {
  // A page that nobody sees costs the server nothing.
  const unseen = new AbortController(), hide = () => { if (document.hidden) unseen.abort(); };
  document.addEventListener("visibilitychange", hide);
  try {
    const response = await request("kv/map", { isQuiet: true, signal: unseen.signal });
    for await (const event of events(response)) {
      if (event.layout) map.layout(event.layout);
      map.disk = event.disk_blocks ?? 0;
      map.update(event.runs);
      map.flash(event.recent);
      last = event;
      show(event);
    }
  } catch (error) {
    if (!unseen.signal.aborted) $("counts").textContent = error.status ? error.message : "The connection was lost.";
    if (error.status === 401 || error.status === 403) { $("use-key").hidden = false; return; }
    if (error.status === 400) return;
  } finally { document.removeEventListener("visibilitychange", hide); }
  if (document.hidden) document.addEventListener("visibilitychange", watch, { once: true });
  else setTimeout(watch, unseen.signal.aborted ? 0 : 2000);
}

function tellCell({ pool, block, holders, isPublished, isPinned, owner }) {
  const held = holders ? `held by ${owner ? `#${owner}` : "others"}${holders > 1 ? `, shared by ${count(holders)}` : ""}` : isPublished ? "idle" : "free";
  $("announce-memory").textContent = `${pool.tier} block ${count(block)}: ${held}${isPinned ? ", pinned" : ""}`;
}

function show(event) {
  const { usage, host, queue } = event, info = map.info;
  $("size").textContent = `${count(usage.num_blocks)} of ${info.block_size} tokens, ${size(usage.num_blocks * info.bytes_per_block)}`;
  const parts = [`${count(usage.used)} used`, `${count(usage.idle)} idle`, `${count(usage.free)} free`];
  if (host) parts.push(`host: ${count(host.used)} used, ${count(host.idle)} idle, ${count(host.free)} free`);
  if (event.disk_blocks !== null) parts.push(`disk: ${count(event.disk_blocks)}`);
  $("counts").textContent = parts.join(" \u00b7 ");
  $("map").setAttribute("aria-label", `Map of the KV blocks: ${parts.join(", ")}`);
  const happened = [["num_copies", "copied on write"], ["num_merges", "merged as duplicates"], ["num_evictions", "evicted"]]
    .map(([name, text]) => [usage[name] - (before?.[name] ?? usage[name]), text]).filter(([number]) => number > 0);
  if (happened.length) $("news").textContent = `Just now: ${happened.map(([number, text]) => `${count(number)} ${text}`).join(", ")}.`;
  before = usage;
  $("queue").textContent = `${count(queue.running)} running, ${count(queue.waiting)} queued, ${count(queue.swapped)} swapped`;
  timeline.record(event.requests);
  showRequests(event.requests);
}

const NAMES = { waiting: "queued" };

function showRequests(requests) {
  const body = $("requests").tBodies[0], rows = new Map([...body.rows].map((row) => [Number(row.dataset.number), row]));
  const listed = requests.slice(0, MAX_ROWS);
  const wanted = listed.map((each) => {
    const row = rows.get(each.number) ?? makeRow(each);
    const state = NAMES[each.status] ?? each.status, times = each.num_preemptions ? `${state}, ${each.num_preemptions}\u00d7 preempted` : state;
    [times, each.num_prompt, each.num_cached ?? "\u2013", each.num_output, each.num_blocks].forEach((value, idx) => {
      const text = typeof value === "number" ? count(value) : value, cell = row.cells[idx + 1];
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
  const row = make("tr"), mark = make("i");
  mark.style.background = colour(number);
  const button = make("button", { type: "button", className: "quiet", textContent: `#${number}`, title: name });
  row.dataset.number = number;
  row.append(make("td", {}, mark, button), ...[1, 2, 3, 4, 5].map(() => make("td")));
  for (const [on, off] of [["mouseenter", "mouseleave"], ["focusin", "focusout"]]) {
    row.addEventListener(on, () => light(number));
    row.addEventListener(off, () => light(null));
  }
  button.addEventListener("click", () => open(number));
  return row;
}

// Watches how many blocks the samples of an answer share; `stop` returns the greatest numbers seen, null for none.
export function watchSharing(answerId) {
  let most = null, isOver = false;
  (async () => {
    while (!isOver) {
      const row = last?.requests.find((each) => each.request_id.startsWith(answerId));
      const found = row && await getJson(`kv/request?number=${row.number}`, { isQuiet: true }).catch(() => null);
      const now = found && sharing(found.samples);
      if (now && now.entries >= (most?.entries ?? 1)) most = now;
      await new Promise((resolve) => { setTimeout(resolve, 150); });
    }
  })();
  return { stop: () => { isOver = true; return most; } };
}
