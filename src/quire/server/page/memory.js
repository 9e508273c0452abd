// The memory: the live map of the blocks, the requests and the charts, from one stream of events.

import { count, events, getJson, make, request } from "./api.js";
import { addSample, drawCharts } from "./charts.js";
import { BlockMap, colour } from "./map.js";

const $ = (id) => document.getElementById(id);
const MAX_ROWS = 40;
let map = null, last = null, before = null, lit = null;

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let step = 0;
  while (bytes >= 1024 && step < units.length - 1) { bytes /= 1024; step += 1; }
  return `${bytes.toFixed(bytes < 10 && step ? 1 : 0)} ${units[step]}`;
}

export function startMemory() {
  map = new BlockMap($("map"), showBlock);
  setInterval(() => { if (last) { addSample(last); drawCharts($("charts")); } }, 1000);
  watch();
}

async function watch() {
  try {
    const response = await request("kv/map");
    for await (const event of events(response)) {
      if (event.layout) map.layout(event.layout);
      map.update(event.runs);
      last = event;
      show(event);
    }
  } catch (error) {
    $("counts").textContent = error.status ? error.message : "The connection was lost.";
    if (error.status === 403 || error.status === 400) return;
  }
  setTimeout(watch, 2000);
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
  showRequests(event.requests);
}

const NAMES = { waiting: "queued" };

function showRequests(requests) {
  const body = $("requests").tBodies[0], rows = new Map([...body.rows].map((row) => [Number(row.dataset.number), row]));
  const listed = requests.slice(0, MAX_ROWS);
  const wanted = listed.map((each) => {
    const row = rows.get(each.number) ?? makeRow(each);
    const state = each.num_preemptions ? `${NAMES[each.status] ?? each.status} (preempted ${each.num_preemptions}\u00d7)` : NAMES[each.status] ?? each.status;
    [state, each.num_prompt, each.num_cached ?? "\u2013", each.num_output, each.num_blocks].forEach((value, idx) => {
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
  const open = make("button", { type: "button", className: "quiet", textContent: `#${number}`, title: name });
  row.dataset.number = number;
  row.append(make("td", {}, mark, open), ...[1, 2, 3, 4, 5].map(() => make("td")));
  for (const [on, off] of [["mouseenter", "mouseleave"], ["focusin", "focusout"]]) {
    row.addEventListener(on, () => light(number));
    row.addEventListener(off, () => light(null));
  }
  open.addEventListener("click", () => showRequest(number));
  return row;
}

function showDetail(title, lines, text = null) {
  const close = make("button", { type: "button", className: "quiet", textContent: "Close" });
  close.addEventListener("click", () => { $("detail").hidden = true; });
  $("detail").replaceChildren(make("strong", { textContent: title }), " ", close, ...lines.map((line) => make("div", { textContent: line })));
  if (text !== null) $("detail").append(make("pre", { textContent: text, tabIndex: 0 }));
  $("detail").hidden = false;
}

async function showRequest(number) {
  try {
    const found = await getJson(`kv/request?number=${number}`), end = found.hit_end;
    const lines = [`${found.status}; ${count(found.num_prompt)} prompt tokens, ${count(found.num_output)} written`];
    if (end) {
      lines.push(`The prefix was hit for ${count(found.num_cached)} tokens. Why it ended: ${end.meaning}.`);
      if (end.differs_at !== null) lines.push(`The cached prefix differs from token ${count(end.differs_at)} on.`);
      lines.push(`From: ${Object.entries(found.by_source).filter(([, each]) => each).map(([name, each]) => `${name} ${count(each)}`).join(", ")}`);
    }
    const tables = found.samples.map((each) => `sample ${each.sample} (${each.status}): ${each.tables.map((table) => table.join(" ")).join(" | ")}`);
    showDetail(`Request #${number}`, lines, `Block table\n${tables.join("\n")}`);
  } catch (error) { showDetail(`Request #${number}`, [error.status === 404 ? "It has finished." : error.message]); }
}

async function showBlock(pool, block) {
  try {
    const found = await getJson(`kv/block?pool=${pool}&block=${block}`);
    const lines = [`${found.tier}, ${found.holders === null ? "of others" : `${count(found.holders)} holders`}${found.is_published ? ", published" : ""}${found.pins.length ? `, pinned as ${found.pins.join(", ")}` : ""}`];
    for (const each of found.held_by) lines.push(`held by #${each.number}, sample ${each.sample}, from token ${count(each.first_token)} on`);
    if (found.unchanged_s !== null) lines.push(`unchanged for ${found.unchanged_s.toFixed(1)} s`);
    showDetail(`Block ${block}`, lines, found.text ?? (found.token_ids ? found.token_ids.join(" ") : null));
  } catch (error) { showDetail(`Block ${block}`, [error.message]); }
}
