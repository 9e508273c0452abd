"""Pooling: requests with a result of the model at their prompt (an embedding, or logits) instead of an output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from quire.errors import InvalidParameter
from quire.sequences.param_checks import integer
from quire.sequences.params import SamplingParams

MAX_DIMENSIONS = 1 << 20
# The parameters of every pooled request: it samples no token, but its prompt must leave room for one.
NO_SAMPLING: Final = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)


# The rows of a prompt whose hidden states are pooled: the last one, the first one, or the mean of all; "classify" for
# the input of a classification head, whose logits are the result.
PoolingKind = Literal["last", "cls", "mean", "classify"]


class Pooling(NamedTuple):
    """The kind of result of a pooled request.

    Args:
        token_ids: tokens whose logits at the last token of the prompt are the result; empty for a hidden state after
            the last norm, or the logits of classes.
        kind: see `PoolingKind`.
        second_start: position of the first token of the second text of a pair, for models with token types; None for
            one text.
    """

    token_ids: tuple[int, ...] = ()
    kind: PoolingKind = "last"
    second_start: int | None = None


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of embeddings; the names are vLLM's.

    Args:
        dimensions: number of leading values to keep (Matryoshka), before they are normalised; None keeps all.
        normalize: True for vectors of length 1; None for the checkpoint's setting, True if it has none.
        truncate_prompt_tokens: number of tokens to which a longer prompt is cut at the end, including the tokenizer's
            special tokens. -1 is as many as fit; None refuses a prompt that does not fit.

    Raises:
        InvalidParameter: a value is not allowed; the message names the field.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            integer("dimensions", self.dimensions, 1, MAX_DIMENSIONS)
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise InvalidParameter("normalize", self.normalize, "true, false or None")
        count = self.truncate_prompt_tokens
        if count is not None and (type(count) is not int or not (count == -1 or 1 <= count < 2**31)):
            raise InvalidParameter("truncate_prompt_tokens", count, f"-1, or an integer from 1 to {2**31 - 1}")
