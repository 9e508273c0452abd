"""Sampling parameters as JSON text; the engine's process checks them again."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Final

from quire.sequences.params import SamplingParams
from quire.sequences.request_json import params_from_json, params_to_json

# Functions and objects of Python's callers, which no request over HTTP has.
LOCAL_FIELDS: Final = ("logits_processors", "strategy", "output_kind")
# Most requests of a client have the same parameters.
NUM_CACHED = 64
MAX_CACHED_CHARS = 4096

_DEFAULTS: Final = SamplingParams()


def encode_params(params: SamplingParams, *, detokenize: bool = True) -> str:
    """Return parameters as JSON."""
    for name in LOCAL_FIELDS:
        if getattr(params, name) != getattr(_DEFAULTS, name):
            raise ValueError(f"{name} cannot be sent to another process")
    fields = params_to_json(params)
    if not detokenize:
        fields["detokenize"] = False
    return json.dumps(fields)


def decode_params(text: str) -> SamplingParams:
    """Return the parameters of `encode_params`, not to be changed: others may have the same object."""
    return _cached(text) if len(text) <= MAX_CACHED_CHARS else _decode(text)


def _decode(text: str) -> SamplingParams:
    return params_from_json(json.loads(text))


_cached = lru_cache(NUM_CACHED)(_decode)
