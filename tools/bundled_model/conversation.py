"""Conversations with tools and thinking, as messages and as documents in the form of the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tools.bundled_model.corpus import BOS, END, Document

TOOLS, TOOL = "<|tools|>", "<|tool|>"
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
ROLE_MARKERS = (TOOLS, TOOL)
MARKERS = (*ROLE_MARKERS, THINK, END_THINK, CALL, END_CALL)

# The list of tools is as short as the context wants it: a signature and a description in a line.
CHAT_TEMPLATE = """\
{{ bos_token }}
{%- if tools %}
{{- '<|tools|>' }}
{%- for tool in tools %}
{%- set function = tool.function %}
{{- '\\n' if not loop.first }}{{ function.name + '(' }}
{%- for name, schema in ((function.parameters or {}).properties or {}).items() %}
{{- ', ' if not loop.first }}{{ name }}{{ ': ' if name in (function.parameters.required or []) else '?: ' }}
{{- schema.enum | join(' | ') if schema.enum else schema.type if schema.type is string else 'any' }}
{%- endfor %}
{{- ')' }}{{ ': ' + function.description | trim if function.description }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('The roles are system, user, assistant and tool.') }}
{%- endif %}
{{- '<|' + message.role + '|>' + message.content | trim }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>' }}{% endif %}
{%- endif %}
"""


def signature(tool: Mapping[str, Any]) -> str:
    """Return the line of a tool in the list of tools.

    Args:
        tool: definition in OpenAI's form.
    """
    function = tool["function"]
    properties, required = function["parameters"]["properties"], function["parameters"].get("required", ())
    shown = ", ".join(
        f"{name}{'' if name in required else '?'}: {' | '.join(of.get('enum', [of['type']]))}"
        for name, of in properties.items()
    )
    described = f": {function['description']}" if function.get("description") else ""
    return f"{function['name']}({shown}){described}"


def document_of(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Document:
    """Return the document of a conversation; the model learns the assistant's messages.

    Args:
        messages: messages in OpenAI's form; the last one may have `reasoning`, which the model writes first.
        tools: definitions of the tools.
    """
    pieces: Document = []
    before = BOS + (TOOLS + "\n".join(map(signature, tools)) + END if tools else "")
    for message in messages:
        before += f"<|{message['role']}|>"
        if message["role"] != "assistant":
            before += message["content"] + END
            continue
        said = written(message) + END
        if "reasoning" in message:
            before += THINK
            said = message["reasoning"] + END_THINK + said
        pieces += [(before, False), (said, True)]
        before = ""
    return pieces


def prompt_of(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, is_thinking: bool = False
) -> str:
    """Return a conversation as a prompt for the assistant's next message.

    Args:
        messages: messages in OpenAI's form.
        tools: definitions of the tools.
        is_thinking: True where the next message begins with thinking.
    """
    following = {"role": "assistant", "content": ""} | ({"reasoning": ""} if is_thinking else {})
    return "".join(text for text, _ in document_of([*messages, following], tools)[:-1])


def written(message: Mapping[str, Any]) -> str:
    """Return an assistant's message as the model writes it, calls included, thinking not.

    Args:
        message: message in OpenAI's form.
    """
    lines = []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"], ensure_ascii=False)
        lines.append(f'{CALL}\n{{"name": "{name}", "arguments": {arguments}}}\n{END_CALL}')
    return "\n".join([message["content"], *lines] if message["content"] else lines)
