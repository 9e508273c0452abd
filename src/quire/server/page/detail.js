// What one block or one request holds, in words, in the panel below the map.

import { count, getJson, make } from "./api.js";

const $ = (id) => document.getElementById(id);

function show(title, lines, text = null) {
  const before = document.activeElement, close = make("button", { type: "button", className: "quiet", textContent: "Close" });
  const leave = () => { $("detail").hidden = true; if (before?.isConnected) before.focus({ preventScroll: true }); };
  close.addEventListener("click", leave);
  $("detail").onkeydown = (event) => { if (event.key === "Escape") leave(); };
  $("detail").replaceChildren(make("strong", { textContent: title }), " ", close, ...lines.map((line) => make("div", { textContent: line })));
  if (text !== null) $("detail").append(make("pre", { textContent: text, tabIndex: 0 }));
  $("detail").hidden = false;
  $("announce-memory").textContent = `${title}. ${lines.join(". ")}`;
  $("detail").scrollIntoView({ block: "nearest" });
  close.focus({ preventScroll: true });
}

const listed = (counts) => Object.entries(counts).filter(([, each]) => each).map(([name, each]) => `${name} ${count(each)}`).join(", ");

export async function showRequest(number, phases) {
  const title = `Request #${number}`, times = phases ? [`Seen here: ${phases}`] : [];
  try {
    const found = await getJson(`kv/request?number=${number}`), end = found.hit_end;
    const lines = [`${found.status}; ${count(found.num_prompt)} prompt tokens, ${count(found.num_output)} written`, ...times];
    if (end) {
      lines.push(`The prefix was hit for ${count(found.num_cached)} tokens. Why it ended: ${end.meaning}.`);
      if (end.differs_at !== null) lines.push(`The cached prefix differs from token ${count(end.differs_at)} on.`);
      lines.push(`Prompt tokens by source: ${listed(found.by_source)}`, `Computed ones by reason: ${listed(found.computed_by_reason) || "none"}`);
    }
    const tables = found.samples.map((each) => `sample ${each.sample} (${each.status}): ${each.tables.map((table) => table.join(" ")).join(" | ")}`);
    show(title, lines, `Block table\n${tables.join("\n")}`);
  } catch (error) {
    show(title, [error.status === 404 ? "It has finished, and holds no blocks any more." : error.message, ...times]);
  }
}

export async function showBlock(pool, block) {
  try {
    const found = await getJson(`kv/block?pool=${pool}&block=${block}`);
    const holders = found.holders === null ? "of others" : `${count(found.holders)} holder${found.holders === 1 ? "" : "s"}`;
    const pins = found.pins.length ? `, pinned as ${found.pins.join(", ")}` : "";
    const lines = [`On the ${found.tier}; ${holders}${found.is_published ? ", published" : ""}${pins}`];
    for (const each of found.held_by) lines.push(`Held by #${each.number}, sample ${each.sample}, from token ${count(each.first_token)} on`);
    lines.push(found.unchanged_s === null ? "Unchanged since the map is watched" : `Last changed ${found.unchanged_s.toFixed(1)} s ago`);
    show(`Block ${block}`, lines, found.text ?? (found.token_ids ? found.token_ids.join(" ") : null));
  } catch (error) { show(`Block ${block}`, [error.message]); }
}

// How many blocks the samples of a request share, from its block tables.
export function sharing(samples) {
  const entries = samples.flatMap(({ status, tables }) => tables.flatMap(
    (table, idx) => table.filter(Boolean).map((block) => `${status === "swapped"}.${idx}.${block}`)));
  const blocks = new Set(entries).size;
  return { entries: entries.length, blocks, fewer: entries.length - blocks };
}
