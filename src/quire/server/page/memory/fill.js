// "Fill the memory": 24 streams that share a beginning, so that a visitor sees blocks shared, evicted and swapped.

import { events, request } from "../base/api.js";
import { $ } from "../base/elements.js";
import { plural } from "../base/words.js";

const BEGINNING = "You are a narrator who tells long stories about ships, storms and quiet harbours. ".repeat(8);
const THEMES = ["a lighthouse", "an old map", "two brothers", "a green parrot", "the last whale", "a storm at night"];
// A browser opens few connections to a host, so each has several prompts; the second wave comes behind the first.
const WAVES = [
  { prompts: 12, n: 1, after_ms: 0 },
  { prompts: 6, n: 2, after_ms: 3000 },
];
let running = null;

const promptOf = (idx) =>
  `${BEGINNING}Tell a story about ${THEMES[idx % THEMES.length]}${idx < THEMES.length ? "" : `, part ${idx}`}.\n`;

async function wave({ prompts, n, after_ms: wait }, first, maxTokens, signal) {
  await new Promise((resolve) => {
    setTimeout(resolve, wait);
  });
  if (signal.aborted) return 0;
  const prompt = Array.from({ length: prompts }, (_, idx) => promptOf(first + idx));
  const body = { prompt, n, max_tokens: maxTokens, temperature: 1, stream: true, ignore_eos: true };
  const response = await request("v1/completions", { body, signal });
  let tokens = 0;
  for await (const chunk of events(response)) {
    if (chunk.error) throw new Error(chunk.error.message);
    tokens += chunk.choices.length;
  }
  return tokens;
}

// `status` is that of the server, null where it may not be read.
export function startFill(status) {
  $("fill").addEventListener("click", async () => {
    if (running) {
      running.abort();
      return;
    }
    running = new AbortController();
    $("fill").textContent = "Stop filling";
    const context = status?.max_model_len ?? 1024,
      maxTokens = Math.max(16, Math.min(2048, context - 320));
    $("fill-note").textContent = status
      ? needsOf(status, Math.min(context, maxTokens + 200))
      : "24 streams are running.";
    try {
      let first = 0;
      await Promise.all(
        WAVES.map((each) => {
          const mine = first;
          first += each.prompts;
          return wave(each, mine, maxTokens, running.signal);
        }),
      );
      $("fill-note").textContent =
        "The 24 streams have ended. What they computed is idle: free to be hit, and free to be evicted.";
    } catch (error) {
      running.abort();
      $("fill-note").textContent = error.name === "AbortError" ? "Stopped." : error.message;
    }
    running = null;
    $("fill").textContent = "Fill the memory";
  });
}

function needsOf({ block_size: tokens, memory: { num_blocks: total } }, longest) {
  const wanted = 24 * Math.ceil(longest / tokens);
  const hint =
    wanted < total
      ? " To see blocks evicted and swapped, start the server with --num-kv-blocks 600 --swap-space 64MiB."
      : "";
  const need = `Alone they would need up to ${plural(wanted, "block")}; the cache has ${plural(total, "block")}.`;
  return `24 streams run. ${need}${hint}`;
}
