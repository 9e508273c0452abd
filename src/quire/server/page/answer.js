// One answer of the server: the request from a path of messages, and the stream into one message or several samples.

import { count, events, request } from "./api.js";
import * as store from "./conversations.js";
import { watchSharing } from "./memory.js";
import { readSettings, systemPrompt } from "./settings.js";
import { keptToken } from "./tokens.js";

function toMessage({ role, content, calls, callId }) {
  if (role === "tool") return { role, content, tool_call_id: callId };
  if (!calls) return { role, content };
  const asked = calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content: content || null, tool_calls: asked };
}

// The request for an answer behind a message; `begun` is the beginning that the answer continues.
function bodyOf(conversation, parent, hasChat, numSamples, begun) {
  const body = { ...readSettings(hasChat), ...(numSamples > 1 ? { n: numSamples } : {}) };
  const said = store.path(conversation, parent).filter((message) => !message.error);
  if (!hasChat) return { ...body, prompt: said.at(-1).content + (begun?.content ?? "") };
  const system = systemPrompt().trim() ? [{ role: "system", content: systemPrompt() }] : [];
  const messages = [...system, ...said.map(toMessage)];
  if (!begun) return { ...body, messages };
  return { ...body, messages: [...messages, { role: "assistant", content: begun.content }], continue_final_message: true };
}

// Adds a piece of the stream to a message; returns whether it had text.
function read(message, choice, hasChat) {
  const delta = hasChat ? choice.delta : { content: choice.text };
  const reasoning = delta.reasoning ?? delta.reasoning_content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  if (delta.content) message.content += delta.content;
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (message.calls ??= [])[index] ??= { id, name: "", arguments: "" };
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
  for (const token of hasChat ? choice.logprobs?.content ?? [] : []) (message.tokens ??= []).push(keptToken(token));
  return Boolean(reasoning || delta.content || delta.tool_calls);
}

// Tokens that arrived together, as on a busy machine, say nothing of the rate at which they were written.
const SHORTEST_MS = 5;

function noteOf({ usage, waited, wrote, isBranch, blockSize, shared, samples }) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, total = usage.prompt_tokens;
  const blocks = isBranch && blockSize ? ` (${count(Math.floor(cached / blockSize))} blocks)` : "";
  const read = isBranch ? `branch: ${count(cached)} of ${count(total)} prompt tokens shared${blocks}` : `${count(total)} tokens read, ${count(cached)} from cache`;
  const rate = usage.completion_tokens > 1 && wrote >= SHORTEST_MS ? `, ${((usage.completion_tokens - 1) / wrote * 1000).toFixed(1)} tokens/s` : "";
  // What was seen of the block tables; of an answer that was too short for that, the whole blocks of its prompt.
  const seen = shared ?? (blockSize ? { fewer: (samples - 1) * Math.floor(total / blockSize) } : null);
  const held = seen?.blocks ? ` in ${count(seen.blocks)} blocks,` : ":";
  const fewer = seen?.fewer ? `${held} ${count(seen.fewer)} blocks fewer than alone` : " share no whole block";
  const side = samples > 1 && seen ? `; ${samples} samples${fewer}` : "";
  return `${read}; ${count(usage.completion_tokens)} written; first after ${(waited / 1000).toFixed(2)} s${rate}${side}`;
}

// Streams an answer into messages, one for each sample; calls `onPiece` after each piece of it.
export async function stream({ conversation, parent, messages, begun, hasChat, blockSize, isBranch, signal, onPiece }) {
  const began = performance.now();
  let first = null, usage = null, watched = null;
  try {
    const path = hasChat ? "v1/chat/completions" : "v1/completions";
    const body = bodyOf(conversation, parent, hasChat, messages.length, begun);
    for await (const chunk of events(await request(path, { body, signal }))) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (messages.length > 1) watched ??= watchSharing(chunk.id);
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) if (read(messages[choice.index], choice, hasChat)) first ??= performance.now();
      onPiece();
    }
  } catch (error) {
    if (error.name !== "AbortError") for (const message of messages) message.error = error.message;
  }
  const shared = watched?.stop();
  if (usage) {
    const times = { waited: (first ?? performance.now()) - began, wrote: first ? performance.now() - first : 0 };
    messages[0].note = noteOf({ usage, ...times, isBranch, blockSize, shared, samples: messages.length });
  }
}
