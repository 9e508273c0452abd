"""What an output must look like: a JSON schema, a regular expression, some choices, a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What an output must look like. Exactly one is given.

    Args:
        json: a JSON schema.
        json_object: any JSON object.
        regex: a regular expression of the whole output.
        choice: the output is one of these.
        grammar: a grammar in the dialect of Lark that `llguidance` reads.
    """

    json: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
