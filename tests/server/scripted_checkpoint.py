"""A tiny model that plays the turns of a script, one after each result of a tool: for clients that act on answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.server import checkpoint

# Agents send tens of thousands of characters, and each is a token here.
CONTEXT = 1 << 17
# Names of the formats of `text/tool_calls` that have no marker, so that a whole turn is one token.
TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|system|>{{ tools | tojson }} as in <|python_tag|>{{ eos_token }}{% endif %}"
    "{% set turns = namespace(number=0) %}"
    "{% for message in messages %}{% if message.role == 'tool' %}{% set turns.number = turns.number + 1 %}{% endif %}"
    "<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><|turn{{ [turns.number, LAST] | min }}|>{% endif %}"
)


def call(name: str, **arguments: Any) -> str:
    """Return a turn that calls a function."""
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


def save(folder: Path, turns: Sequence[str]) -> Path:
    """Write a model that says the turns: the first until a tool has answered, and the last from then on for ever."""
    names = [f"<|turn{idx}|>" for idx in range(len(turns))]
    tokens = [AddedToken(name, special=True, normalized=False) for name in (*names, "<|python_tag|>", "<|tool|>")]
    tokens += [AddedToken(turn, special=False, normalized=False) for turn in turns]
    paths = [(0.9, [name, turn, "<|eos|>"]) for name, turn in zip(names, turns, strict=True)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "CONTEXT", CONTEXT)
        return checkpoint.save(folder, TEMPLATE.replace("LAST", str(len(turns) - 1)), tokens, paths)
