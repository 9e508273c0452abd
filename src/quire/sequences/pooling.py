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


# The rows of a prompt whose hidden states are pooled: the last one, the first one, or all, as their mean, their sum
# divided by the root of their number, their mean weighted by position (1, 2, ...), or their largest values; "classify"
# for the input of a classification head, whose logits are the result; "tokens" for the logits of such a head at each
# token, one token after the other.
PoolingKind = Literal["last", "cls", "mean", "mean_sqrt_len_tokens", "weightedmean", "max", "classify", "tokens"]
# The part of a text in a search.
Role = Literal["query", "document"]
# Kinds that need the hidden states of all rows.
OF_ALL_ROWS: Final[frozenset[PoolingKind]] = frozenset(
    {"mean", "mean_sqrt_len_tokens", "weightedmean", "max", "tokens"}
)


class Pooling(NamedTuple):
    """The kind of result of a pooled request.

    Args:
        token_ids: tokens whose logits at the last token of the prompt are the result; empty for a hidden state after
            the last norm, or the logits of classes.
        kind: see `PoolingKind`.
        second_start: position of the first token of the second text of a pair, for models with token types; None for
            one text.
        first: number of leading tokens that are not pooled, those of a prompt; less than all. A result of the last row
            does not depend on it.
    """

    token_ids: tuple[int, ...] = ()
    kind: PoolingKind = "last"
    second_start: int | None = None
    first: int = 0

    @property
    def reads_all(self) -> bool:
        """True if the result needs the hidden states of all rows of the prompt."""
        return self.kind in OF_ALL_ROWS


@dataclass(frozen=True, slots=True)
class PromptedText:
    """A text behind a prompt whose tokens are not pooled.

    Args:
        prompt, text: the two, which are tokenized as one.
    """

    prompt: str
    text: str


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
