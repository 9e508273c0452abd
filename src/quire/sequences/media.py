"""Media of a prompt: embeddings that replace the embeddings of a span of its tokens."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory.prefix.prompt_embeddings import MediaSpan


class Media(NamedTuple):
    """One medium of a prompt.

    Args:
        span: positions of its placeholder tokens, and its digest; the only part that memory uses.
        embeddings: tensor [span.num_tokens, (1 + D) E]: embeddings that replace the tokens' own, and additions to the
            outputs of the first D layers, in models with so many deepstack layers; opaque to the control plane.
        grid: numbers of rows and columns of an image's tokens, for models that rotate heads by them; None for tokens
            in a line.
        sees_itself: True if its tokens see each other, also forward: a step computes all of them, or none.
    """

    span: MediaSpan
    embeddings: object
    grid: tuple[int, int] | None = None
    sees_itself: bool = False
