// "Fill the memory": 24 streams that share a beginning, so that a visitor sees blocks shared, evicted and swapped.

import { count, events, request } from "./api.js";

const $ = (id) => document.getElementById(id);
const BEGINNING = "You are a narrator who tells long stories about ships, storms and quiet harbours. ".repeat(8);
const THEMES = ["a lighthouse", "an old map", "two brothers", "a green parrot", "the last whale", "a storm at night"];
// A browser opens few connections to a host, so each has several prompts; the second wave comes behind the first.
const WAVES = [{ prompts: 12, n: 1, after_ms: 0 }, { prompts: 6, n: 2, after_ms: 3000 }];
let running = null;

const promptOf = (idx) => `${BEGINNING}Tell a story about ${THEMES[idx % THEMES.length]}${idx < THEMES.length ? "" : `, part ${idx}`}.\n`;

async function wave({ prompts, n, after_ms: wait }, first, maxTokens, signal) {
  await new Promise((resolve) => { setTimeout(resolve, wait); });
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
    if (running) { running.abort(); return; }
    running = new AbortController();
    $("fill").textContent = "Stop filling";
    const context = status?.max_model_len ?? 1024, maxTokens = Math.max(16, Math.min(2048, context - 320));
    const blocks = status && Math.ceil((24 * Math.min(context, maxTokens + 200)) / status.block_size), total = status?.memory.num_blocks;
    const hint = blocks >= total ? "" : " To see blocks evicted and swapped, start the server with --num-kv-blocks 600 --swap-space 64MiB.";
    $("fill-note").textContent = blocks ? `24 streams, up to ${count(blocks)} blocks of ${count(total)}.${hint}` : "24 streams are running.";
    try {
      let first = 0;
      const waves = WAVES.map((each) => { const mine = first; first += each.prompts; return wave(each, mine, maxTokens, running.signal); });
      await Promise.all(waves);
      $("fill-note").textContent = "The 24 streams have ended. What they computed is idle now: free to be hit, and free to be evicted.";
    } catch (error) {
      running.abort();
      $("fill-note").textContent = error.name === "AbortError" ? "Stopped." : error.message;
    }
    running = null;
    $("fill").textContent = "Fill the memory";
  });
}
