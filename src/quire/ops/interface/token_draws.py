"""Sampling by a backend: the parameters of a step's rows, and their results."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

# States of a row, returned in addition to its token.
FINE, NOTHING_LEFT, BROKEN = range(3)
# Kinds of rows: greedy; sampled from all tokens; from at most `NARROW` (top_k); from any number that filters keep.
GREEDY, WHOLE, FEW, MANY = KINDS = range(4)
# Maximum `top_k` of a row of kind FEW.
NARROW: Final = 256


class RowFilters(NamedTuple):
    """The filters of rows: min_p first, then top_k, then top_p.

    Args:
        temperature: float32 [R], above 0.
        top_k: int64 [R], V for no top_k.
        top_p: float64 [R].
        min_p: float32 [R].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def of(self, rows: Tensor) -> RowFilters:
        """Return the filters of some rows, int64 [n]."""
        return RowFilters(*(part[rows] for part in self))


class RowParameters(NamedTuple):
    """The parameters of a step's rows, on the device.

    Args:
        kinds: int32 [R], one of `KINDS` for each row.
        greedy, whole, few, many: int64, the rows of each kind; None if there are none.
        filters: filters of all rows.
        seeds: int64 [R], two's complement.
        sample_idxs: int64 [R].
        most_few: maximum `top_k` of the rows of kind FEW; 0 if there are none.
        cuts_many: True if a row of kind MANY has a `top_k`.
    """

    kinds: Tensor
    greedy: Tensor | None
    whole: Tensor | None
    few: Tensor | None
    many: Tensor | None
    filters: RowFilters
    seeds: Tensor
    sample_idxs: Tensor
    most_few: int
    cuts_many: bool

    @property
    def draws(self) -> bool:
        """Say whether any row is sampled, not greedy."""
        return not (self.whole is None and self.few is None and self.many is None)


@runtime_checkable
class DrawsTokens(Protocol):
    """A backend that samples tokens on the device, without synchronisation with the host."""

    def check_logits(self, logits: Tensor) -> Tensor:
        """Return which rows can be sampled from, before requests change their logits.

        Args:
            logits: float32 [R, V], contiguous; rows that are `BROKEN` may be overwritten.

        Returns:
            int64 [R]: `FINE`, or `BROKEN` if the maximum logit is not finite or a logit is NaN.
        """

    def draw_tokens(
        self, logits: Tensor, parameters: RowParameters | None, positions: Tensor | None, before: Tensor | None
    ) -> Tensor:
        """Sample a token for each row.

        Args:
            logits: float32 [R, V], contiguous, overwritten.
            parameters: parameters of the rows; None if all are greedy: the likeliest token, the lowest id among equals.
            positions: int64 [R], positions of the tokens in their sequences; None if no row is sampled.
            before: result of `check_logits` before requests changed the logits; None if no request did.

        Returns:
            int64 [2, R]: tokens, and the states of rows. A row that was `BROKEN` before stays so. Any other row without
            finite logits is `NOTHING_LEFT`, or `BROKEN` if `before` is None. The token of a row that is not `FINE` has
            no meaning, but is a valid id.
        """
