"""Sequences without an engine, for what only looks at them."""

from __future__ import annotations

from typing import Any

from quire.memory.prefix.token_chain import Namespace, TokenChain, root_of
from quire.sequences.decoding.strategies import SAMPLING
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request, Sequence


def sequence_of(
    seq_id: int, prompt: list[int], output: list[int], tenant: str | None = None, **params: Any
) -> Sequence:
    """Return a sequence that has some output."""
    namespace = Namespace("model", cache_salt=tenant)
    options = SamplingParams(**params)
    request = Request(str(seq_id), prompt, options, 10_000, frozenset(), arrival=seq_id, seed=0, namespace=namespace)
    tokens = prompt + output
    chain = TokenChain(tokens, root_of(namespace, b""), 16)
    return Sequence(seq_id, request, 0, tokens, chain, (0, seq_id, 0), SAMPLING)
