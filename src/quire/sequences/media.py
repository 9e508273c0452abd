"""Media of a prompt: embeddings that replace the embeddings of a span of its tokens."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory.prefix.prompt_embeddings import MediaSpan


class Media(NamedTuple):
    """One medium of a prompt.

    Args:
        span: positions of its placeholder tokens, and its digest; the only part that memory uses.
        embeddings: tensor [span.num_tokens, E] that replaces the tokens' own embeddings; opaque to the control plane.
    """

    span: MediaSpan
    embeddings: object
