// One answer of the server: the request from a path of messages, and the stream into one message or several samples.

import { events, isLost, request } from "../base/api.js";
import { count, plural } from "../base/words.js";
import { watchSharing } from "../memory/memory.js";
import { path } from "./conversations.js";
import { dataOf } from "./pictures.js";
import { readSettings, systemPrompt } from "./settings.js";
import { keptToken } from "./tokens.js";

const GONE = "A picture of this conversation is not kept in this browser. Edit its message to go on without it.";

async function toPart(picture) {
  const url = await dataOf(picture);
  if (!url) throw new Error(GONE);
  return { type: "image_url", image_url: { url } };
}

async function toMessage({ role, content, calls, callId, pictures }) {
  if (role === "tool") return { role, content, tool_call_id: callId };
  if (pictures?.length) {
    const parts = await Promise.all(pictures.map(toPart));
    return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
  }
  if (!calls) return { role, content };
  const asked = calls.map(({ id, name, arguments: text }) => ({
    id,
    type: "function",
    function: { name, arguments: text },
  }));
  return { role, content: content || null, tool_calls: asked };
}

// An answer that failed before it began says nothing to the model.
const isSaid = ({ role, content, calls }) => role !== "assistant" || content || calls;

// The request for an answer behind a message; `begun` is the beginning that the answer continues.
async function bodyOf(conversation, parent, { hasChat, numSamples, begun }) {
  const body = { ...readSettings(hasChat), ...(numSamples > 1 ? { n: numSamples } : {}) };
  const said = path(conversation, parent).filter(isSaid);
  if (!hasChat) return { ...body, prompt: said.at(-1).content + (begun ?? "") };
  const system = systemPrompt().trim() ? [{ role: "system", content: systemPrompt() }] : [];
  const messages = [...system, ...(await Promise.all(said.map(toMessage)))];
  if (begun === null) return { ...body, messages };
  return { ...body, messages: [...messages, { role: "assistant", content: begun }], continue_final_message: true };
}

// Adds a piece of the stream to a message; returns whether it had text.
function read(message, choice, hasChat) {
  const delta = hasChat ? choice.delta : { content: choice.text };
  const reasoning = delta.reasoning ?? delta.reasoning_content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  if (delta.content) message.content += delta.content;
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = ((message.calls ??= [])[index] ??= { id, name: "", arguments: "" });
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
  for (const token of hasChat ? (choice.logprobs?.content ?? []) : []) (message.tokens ??= []).push(keptToken(token));
  if (choice.finish_reason) message.end = choice.finish_reason;
  return Boolean(reasoning || delta.content || delta.tool_calls);
}

// Tokens that arrived together, as on a busy machine, say nothing of the rate at which they were written.
const SHORTEST_MS = 5;

function noteOf({ usage, waited, wrote, isBranch, blockSize, shared, samples }) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0,
    total = usage.prompt_tokens;
  const blocks = isBranch && blockSize ? ` (${plural(Math.floor(cached / blockSize), "block")})` : "";
  const prompt = isBranch
    ? `branch: ${count(cached)} of ${plural(total, "prompt token")} shared${blocks}`
    : `${plural(total, "token")} read, ${count(cached)} from cache`;
  const isTimed = usage.completion_tokens > 1 && wrote >= SHORTEST_MS;
  const rate = isTimed ? `, ${(((usage.completion_tokens - 1) / wrote) * 1000).toFixed(1)} tokens/s` : "";
  // What was seen of the block tables; of an answer that was too short for that, the whole blocks of its prompt.
  const seen = shared ?? (blockSize ? { fewer: (samples - 1) * Math.floor(total / blockSize) } : null);
  const held = seen?.blocks ? ` in ${plural(seen.blocks, "block")},` : ":";
  const fewer = seen?.fewer ? `${held} ${plural(seen.fewer, "block")} fewer than alone` : " share no whole block";
  const side = samples > 1 && seen ? `; ${samples} samples${fewer}` : "";
  const written = `${count(usage.completion_tokens)} written; first after ${(waited / 1000).toFixed(2)} s`;
  return `${prompt}; ${written}${rate}${side}`;
}

// How messages end that got no reason of the server: by the user, with the connection, or by an error.
function endAll(messages, error, isStopped) {
  for (const message of messages) {
    if (message.end !== "open") continue;
    message.end = isStopped ? "stopped" : error && !isLost(error) ? "failed" : "lost";
    if (error && !isStopped) message.error = error.message;
  }
}

// Streams an answer into messages, one for each sample; calls `onPiece` after each piece of it. Each message gets an
// `end`: a finish reason of the server, "stopped", "lost" (with the connection) or "failed". Returns the error or null.
export async function stream({ conversation, parent, messages, begun, hasChat, blockSize, isBranch, signal, onPiece }) {
  const began = performance.now();
  let first = null,
    usage = null,
    watched = null,
    failed = null;
  for (const message of messages) {
    message.end = "open";
    delete message.error;
    delete message.refused;
  }
  try {
    const route = hasChat ? "v1/chat/completions" : "v1/completions";
    const body = await bodyOf(conversation, parent, { hasChat, numSamples: messages.length, begun });
    for (const message of messages) if (messages.length > 1) message.limit = body.max_tokens;
    for await (const chunk of events(await request(route, { body, signal }))) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (messages.length > 1) watched ??= watchSharing(chunk.id);
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices)
        if (read(messages[choice.index], choice, hasChat)) first ??= performance.now();
      onPiece();
    }
  } catch (error) {
    failed = error;
  }
  endAll(messages, failed, signal.aborted);
  const shared = watched?.stop();
  if (!usage) return failed;
  const times = { waited: (first ?? performance.now()) - began, wrote: first ? performance.now() - first : 0 };
  messages[0].note = noteOf({ usage, ...times, isBranch, blockSize, shared, samples: messages.length });
  if (messages.length === 1)
    messages[0].limit = (begun === null ? 0 : (messages[0].limit ?? 0)) + usage.completion_tokens;
  return failed;
}
