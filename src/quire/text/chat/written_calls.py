"""Tool calls in LFM2's syntax, for its older templates, which leave earlier calls out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
# Marks that identify LFM2's templates; the older ones have no mark of calls.
SHOWN = (OPEN, "<|tool_list_start|>", "<|tool_response_start|>", "List of tools: [")
WORDS: Mapping[str, str] = {"true": "True", "false": "False", "null": "None"}


def writes_no_calls(source: str) -> bool:
    """Return whether a template of LFM2's format leaves the calls of earlier messages out."""
    return "tool_calls" not in source and any(mark in source for mark in SHOWN)


def written_calls(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return calls in the model's syntax."""
    return f"{OPEN}[{', '.join(map(_written, calls))}]{CLOSE}"


def _written(call: Mapping[str, Any]) -> str:
    function = call["function"]
    arguments = (f"{key}={_python(value)}" for key, value in function["arguments"].items())
    return f"{function['name']}({', '.join(arguments)})"


def _python(value: Any) -> str:
    """Return a value as a Python literal with JSON strings."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_python(key)}: {_python(one)}' for key, one in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_python, value))}]"
    text = json.dumps(value, ensure_ascii=False)
    return WORDS.get(text, text)
