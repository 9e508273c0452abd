"""Media of a prompt: which of its tokens they stand at, and what is computed there."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory.prefix.prompt_embeddings import MediaSpan


class Media(NamedTuple):
    """One medium of a prompt.

    Args:
        span: the tokens that stand for it; memory knows no more.
        embeddings: what the data plane computes there in place of the tokens' own embeddings: a tensor
            [span.num_tokens, E]. The control plane only carries it.
    """

    span: MediaSpan
    embeddings: object
