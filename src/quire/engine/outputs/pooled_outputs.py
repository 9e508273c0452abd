"""Outputs of pooled requests: embeddings and scores; the names are vLLM's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from quire.engine.outputs.outputs import RequestOutput
from quire.errors import RequestFailed, WorkerError

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class PooledRequestOutput(Generic[ResultT]):
    """The result of one pooled request.

    Args:
        request_id: name of the request.
        outputs: the result.
        prompt_token_ids: the prompt's token ids.
        num_cached_tokens: number of them that came from the prefix cache.
        finished: always True.
    """

    request_id: str
    outputs: ResultT
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True)
class EmbeddingOutput:
    """An embedding.

    Args:
        embedding: its values.
    """

    embedding: list[float]


class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """The embedding of one prompt."""

    __slots__ = ()


@dataclass(slots=True)
class ScoringOutput:
    """A score.

    Args:
        score: 0 to 1 from a reranker, -1 to 1 for a cosine similarity; higher for a better match.
    """

    score: float


class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """The score of one pair of texts; its request is that of the document."""

    __slots__ = ()


@dataclass(slots=True)
class ClassificationOutput:
    """The class scores of a text.

    Args:
        probs: score of each class, in the order of the model's classes.
    """

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.probs)


class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """The classes of one prompt; no token of it comes from the prefix cache."""

    __slots__ = ()


@dataclass(slots=True)
class TokenClassificationOutput:
    """The class scores of the tokens of a text.

    Args:
        positions: positions in the prompt of the tokens that are classified: all, or those that end a step.
        probs: score of each class, in the order of the model's classes, for each of them.
    """

    positions: list[int]
    probs: list[list[float]]


class TokenClassificationRequestOutput(PooledRequestOutput[TokenClassificationOutput]):
    """The classes of the tokens of one prompt; no token of it comes from the prefix cache."""

    __slots__ = ()


def embedding_of(values: Sequence[float], dimensions: int | None, *, normalize: bool) -> list[float]:
    """Return the embedding of a hidden state.

    Args:
        values: the pooled hidden state after the last norm, E values.
        dimensions: number of leading values to keep (Matryoshka); None keeps all.
        normalize: True to scale the kept values to L2 norm 1.
    """
    kept = list(values[:dimensions])
    if not normalize:
        return kept
    length = math.hypot(*kept) or 1.0
    return [value / length for value in kept]


def pooled_values(output: RequestOutput) -> tuple[float, ...]:
    """Return the result of a finished pooled request.

    Raises:
        RequestFailed, WorkerError: the request failed, by its own fault or not.
    """
    if not output.pooled:
        reason = output.error or "the request was aborted"
        raise RequestFailed(reason) if output.error_code == RequestFailed.code else WorkerError(reason)
    return output.pooled
