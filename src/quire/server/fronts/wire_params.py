"""Sampling parameters as JSON: the fields that differ from their defaults; the engine's process checks them again."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any, Final

from quire.sequences.params import SamplingParams
from quire.sequences.structured import StructuredOutputs
from quire.sequences.thinking import ThinkingTokens

# Functions and objects of Python's callers, which no request over HTTP has.
LOCAL_FIELDS: Final = ("logits_processors", "strategy", "output_kind")
# Most requests of a client have the same parameters.
NUM_CACHED = 64
MAX_CACHED_CHARS = 4096

_DEFAULTS: Final = {
    field.name: field.default for field in fields(SamplingParams) if field.init and field.default is not MISSING
}


def encode_params(params: SamplingParams) -> str:
    """Return parameters as JSON.

    Raises:
        ValueError: parameters with a field of `LOCAL_FIELDS`.
    """
    given: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value is default or value == default:
            continue
        if name in LOCAL_FIELDS:
            raise ValueError(f"{name} cannot be sent to another process")
        given[name] = _plain(value)
    return json.dumps(given)


def decode_params(text: str) -> SamplingParams:
    """Return the parameters of `encode_params`, not to be changed: others may have the same object.

    Raises:
        RequestError: a value is not allowed.
    """
    return _cached(text) if len(text) <= MAX_CACHED_CHARS else _decode(text)


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputs):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, ThinkingTokens):
        plain = {field.name: getattr(value, field.name) for field in fields(value)}
        return plain | {"boundary_ids": sorted(value.boundary_ids)}
    # JSON has no integers as keys.
    return list(value.items()) if hasattr(value, "items") else value


def _decode(text: str) -> SamplingParams:
    given = json.loads(text)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputs(**given["structured_outputs"])
    if "thinking" in given:
        marks = given["thinking"]
        tuples = {name: tuple(marks[name]) for name in ("end_ids", "close_ids")}
        given["thinking"] = ThinkingTokens(**{**marks, **tuples, "boundary_ids": frozenset(marks["boundary_ids"])})
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**given)


_cached = lru_cache(NUM_CACHED)(_decode)
