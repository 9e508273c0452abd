// What one block or one request holds, in words, in the panel below the map.

import { getJson } from "../base/api.js";
import { $, make } from "../base/elements.js";
import { count, plural } from "../base/words.js";

const MAX_HOLDERS = 24;

function show(title, lines, text = null) {
  const before = document.activeElement,
    close = make("button", { type: "button", className: "quiet", textContent: "Close" });
  const leave = () => {
    $("detail").hidden = true;
    if (before?.isConnected) before.focus({ preventScroll: true });
  };
  close.addEventListener("click", leave);
  $("detail").onkeydown = (event) => {
    if (event.key === "Escape") {
      event.preventDefault();
      leave();
    }
  };
  const parts = lines.map((line) => make("div", { textContent: line }));
  $("detail").replaceChildren(make("strong", { textContent: title }), " ", close, ...parts);
  if (text !== null) $("detail").append(make("pre", { textContent: text, tabIndex: 0 }));
  $("detail").hidden = false;
  $("announce-memory").textContent = `${title}. ${lines.join(". ")}`;
  $("detail").scrollIntoView({ block: "nearest" });
  close.focus({ preventScroll: true });
}

function listed(counts) {
  return Object.entries(counts)
    .filter(([, each]) => each)
    .map(([name, each]) => `${name} ${count(each)}`)
    .join(", ");
}

export async function showRequest(number, phases) {
  const title = `Request #${number}`,
    times = phases ? [`Seen here: ${phases}`] : [];
  try {
    const found = await getJson(`kv/request?number=${number}`),
      end = found.hit_end;
    const lines = [
      `${found.status}; ${plural(found.num_prompt, "prompt token")}, ${count(found.num_output)} written`,
      ...times,
    ];
    if (end) {
      lines.push(`The prefix was hit for ${plural(found.num_cached, "token")}. Why it ended: ${end.meaning}.`);
      if (end.differs_at !== null) lines.push(`The cached prefix differs from token ${count(end.differs_at)} on.`);
      lines.push(`Prompt tokens by source: ${listed(found.by_source)}`);
      lines.push(`Computed ones by reason: ${listed(found.computed_by_reason) || "none"}`);
    }
    const tables = found.samples.map(
      ({ sample, status, tables: groups }) =>
        `sample ${sample} (${status}): ${groups.map((table) => table.join(" ")).join(" | ")}`,
    );
    show(title, lines, `Block table\n${tables.join("\n")}`);
  } catch (error) {
    show(title, [error.status === 404 ? "It has finished, and holds no blocks any more." : error.message, ...times]);
  }
}

// "Held by 21: #2, #14 (2 samples), ...": the requests of the holders, and how many are not shown to this viewer.
function holdersOf({ holders, held_by: known }) {
  if (!holders) return holders === null ? "Held by requests of others" : "Held by nobody";
  const samples = new Map();
  for (const { number } of known) samples.set(number, (samples.get(number) ?? 0) + 1);
  const names = [...samples].map(([number, times]) => (times > 1 ? `#${number} (${times} samples)` : `#${number}`));
  const left = names.length - MAX_HOLDERS,
    others = holders - known.length;
  const rest = [...(left > 0 ? [`${count(left)} more`] : []), ...(others > 0 ? [`${count(others)} of others`] : [])];
  return `Held by ${count(holders)}: ${[...names.slice(0, MAX_HOLDERS), ...rest].join(", ")}`;
}

export async function showBlock(pool, block) {
  try {
    const found = await getJson(`kv/block?pool=${pool}&block=${block}`),
      { held_by: known, unchanged_s: age } = found;
    const pins = found.pins.length ? `, pinned as ${found.pins.join(", ")}` : "";
    const lines = [`On the ${found.tier}${found.is_published ? ", published" : ""}${pins}`, holdersOf(found)];
    const first = [...new Set(known.map((each) => each.first_token))];
    if (first.length === 1) lines.push(`Tokens of their prompts and answers from ${count(first[0])} on`);
    if (found.media_tokens) lines.push(`Tokens that stand for images: ${count(found.media_tokens)}`);
    lines.push(age === null ? "Unchanged since the map is watched" : `Last changed ${age.toFixed(1)} s ago`);
    show(`Block ${block}`, lines, found.text ?? (found.token_ids ? found.token_ids.join(" ") : null));
  } catch (error) {
    show(`Block ${block}`, [error.message]);
  }
}

// How many blocks the samples of a request share, from its block tables.
export function sharing(samples) {
  const entries = samples.flatMap(({ status, tables }) =>
    tables.flatMap((table, idx) => table.filter(Boolean).map((block) => `${status === "swapped"}.${idx}.${block}`)),
  );
  const blocks = new Set(entries).size;
  return { entries: entries.length, blocks, fewer: entries.length - blocks };
}
