"""Tiny models that call tools, each in one of the formats."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from tests.server import checkpoint

# What the models say, token by token.
PATHS: dict[str, list[str]] = {
    "hermes": [
        *("I look.\n", "<tool_call>", '\n{"name": "get_weather", "arguments": ', '{"city": "Par', 'is"}', "}\n"),
        "</tool_call>",
    ],
    "llama3": [
        *('{"name": "get_weather", "parameters": ', '{"city": "Par', 'is"}', "}"),
        ';{"name": "now", "parameters": {}}',
    ],
    "mistral": ["I look.\n", "[TOOL_CALLS]", "get_weather", "[ARGS]", '{"city": "Par', 'is"}'],
    # The grammar writes what is between the mark and the value; the line feed has its name in the vocabulary.
    "qwen3_xml": ["I look.\n", "<tool_call>", "Ċ", "Par", "is\n</parameter>\n</function>\n", "</tool_call>"],
    "gemma4": ["I look.\n", "<|tool_call>", "call:get_weather{city:", '<|"|>', "Par", 'is<|"|>}', "<tool_call|>"],
    "lfm2": ["I look.\n", "<|tool_call_start|>", '[get_weather(city="Par', 'is")]', "<|tool_call_end|>"],
    "deepseek": [
        *("I look.\n", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "get_weather", "<｜tool▁sep｜>"),
        *('{"city": "Par', 'is"}', "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    ],
    "harmony": [
        *("<|channel|>", "commentary to=functions.get_weather ", "<|constrain|>", "json", "<|message|>"),
        *('{"city": "Par', 'is"}', "<|call|>"),
    ],
}
# Formats of whose models each test starts one by default; those of the others are slow.
FORMS = ["hermes", "llama3", "mistral", *(pytest.param(form, marks=pytest.mark.slow) for form in [*PATHS][3:])]
# Without harmony, where this weak model may think without end before a call that it must make.
REQUIRED_FORMS = FORMS[:-1]
# Formats whose calls have no text before them here.
BARE = ("llama3", "harmony")
# What they say where a grammar has written the rest.
CHOICES: list[tuple[float, list[str]]] = [
    (0.6, ['"', "Paris", '"']),
    (0.4, ['"', "get_w"]),
    (0.25, ['"', "}", "<|eos|>"]),
    (0.25, ["Q", "x"]),
]
MARKERS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
    ),
    *("<|tool_call_start|>", "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *(
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
    ),
    *("<|call|>", "<|constrain|>"),
)
SHOWN = {
    "hermes": "<tool_call>JSON</tool_call>",
    "llama3": "<|python_tag|>JSON",
    "mistral": "[TOOL_CALLS]name[ARGS]JSON",
    "qwen3_xml": "<tool_call><function=name><parameter=key></parameter></function></tool_call>",
    "gemma4": "<|tool_call>call:name{}<tool_call|>",
    "lfm2": "<|tool_call_start|>[name()]<|tool_call_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.",
}
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }} as in SHOWN{{ eos_token }}{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}:{{ call.function.arguments.city }}{% endfor %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if style is defined %}{{ style }}{% endif %}"
    "{% if enable_thinking is defined %}{{ 'think' if enable_thinking else 'no' }}{% endif %}"
)


def save(folder: Path, form: str, *, answers: bool = False) -> Path:
    """Write a model that calls tools, and says "xyz" behind a Q.

    Args:
        folder: where.
        form: format of its calls.
        answers: True where it says "xyz" after the result of a call, too.
    """
    path = PATHS[form]
    words = {token for _, tokens in [(0, path), *CHOICES] for token in tokens} - {*MARKERS, "<|eos|>", *'"}QxĊ'}
    marks = [AddedToken(text, special=True, normalized=False) for text in MARKERS]
    plain = [AddedToken(text, special=False, normalized=False) for text in sorted(words)]
    template = TEMPLATE + ("{% if messages[-1].role == 'tool' %}Q{% endif %}" if answers else "")
    paths = [(0.5, ["<|assistant|>", *path, "<|eos|>"]), *CHOICES]
    return checkpoint.save(folder, template.replace("SHOWN", SHOWN[form]), [*marks, *plain], paths)
