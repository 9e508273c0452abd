// The parameters of answers, kept in the browser, as fields of a request.

import { $, make } from "../base/elements.js";

const PARAMETERS = [
  ["temperature", "temperature", { min: 0, max: 2, step: 0.1 }],
  ["max_tokens", "most tokens", { min: 1, step: 1 }],
  ["top_p", "top p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", "top k", { min: 0, step: 1 }],
  ["min_p", "min p", { min: 0, max: 1, step: 0.01 }],
  ["seed", "seed", { step: 1 }],
  ["repetition_penalty", "repetition penalty", { min: 0.1, step: 0.1 }],
  ["presence_penalty", "presence penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", "frequency penalty", { min: -2, max: 2, step: 0.1 }],
];
const KEPT = [...PARAMETERS.map(([name]) => name), "samples", "system", "schema", "tools", "tool-choice", "thinking"];
const EXAMPLES = {
  schema: { type: "object", properties: { answer: { type: "string" } }, required: ["answer"] },
  tools: [
    {
      type: "function",
      function: {
        name: "get_weather",
        description: "The weather of a city",
        parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      },
    },
  ],
};
const DEFAULTS = { max_tokens: "512", samples: "1", "tool-choice": "auto" };

function readKept() {
  try {
    return JSON.parse(localStorage.getItem("quire.settings")) ?? {};
  } catch {
    return {};
  }
}

// `canThink`: the server knows how the model writes its thinking.
export function startSettings(hasChat, canThink) {
  const kept = readKept();
  for (const [name, label, limits] of PARAMETERS) {
    $("fields").append(
      make("label", {}, label, make("input", { type: "number", id: name, placeholder: "model's", ...limits })),
    );
  }
  for (const id of KEPT) $(id).value = kept[id] ?? DEFAULTS[id] ?? "";
  for (const [id, example] of Object.entries(EXAMPLES)) {
    $(`${id}-example`).addEventListener("click", () => {
      $(id).value = JSON.stringify(example, null, 2);
      keep();
      $(id).focus();
    });
  }
  if (!hasChat) for (const id of ["system", "tools"]) $(id).disabled = true;
  $("thinking-box").hidden = !(hasChat && canThink);
  for (const id of ["settings", "thinking"]) $(id).addEventListener("change", keep);
  // It lies over the messages: a click elsewhere, or Escape, closes it.
  addEventListener("pointerdown", ({ target }) => {
    if (!target.closest("#settings")) $("settings").open = false;
  });
  $("settings").addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.preventDefault();
    $("settings").open = false;
    $("settings").querySelector("summary").focus();
  });
}

function keep() {
  const values = Object.fromEntries(KEPT.map((id) => [id, $(id).value]));
  try {
    localStorage.setItem("quire.settings", JSON.stringify(values));
  } catch {
    /* no room */
  }
}

function parse(id, name) {
  try {
    return JSON.parse($(id).value);
  } catch (error) {
    throw new Error(`The ${name} not JSON: ${error.message}`);
  }
}

export const numSamples = () => Number($("samples").value);

export const systemPrompt = () => $("system").value;

// The fields of a request but for its messages.
export function readSettings(hasChat) {
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const [name] of PARAMETERS) if ($(name).value) body[name] = Number($(name).value);
  if ($("schema").value.trim()) {
    body.response_format = {
      type: "json_schema",
      json_schema: { name: "answer", schema: parse("schema", "JSON schema is") },
    };
  }
  if (!hasChat) return body;
  if (!$("thinking-box").hidden && $("thinking").value) body.reasoning_effort = $("thinking").value;
  if ($("tools").value.trim())
    Object.assign(body, { tools: parse("tools", "tools are"), tool_choice: $("tool-choice").value });
  if ($("logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}
