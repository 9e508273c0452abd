"""Captured calls of ranks: all ranks capture a call or none does; on CPUs, all-reduces are launches on the tape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.distributed.transport import Transport
from quire.execution.capture.step_capture import CapturedCall, StepCapture
from quire.execution.capture.tape_capture import SeenLaunches

T = TypeVar("T")


class RankedCapture:
    """Captures calls that all ranks make, in the same order.

    A replayed step has padding rows, and an eager one has none. So a call that one rank cannot capture is captured by
    none: the shapes of their all-reduces would differ.
    """

    def __init__(self, inner: StepCapture, ranks: RankGroup) -> None:
        self._inner, self._ranks = inner, ranks

    def capture(self, run: Callable[[], object]) -> CapturedCall:
        """Capture a call; see `StepCapture`."""
        return self._agreed(lambda: self._inner.capture(run))

    def capture_pieces(self, run: Callable[[Callable[[], None]], object]) -> list[CapturedCall]:
        """Capture a call in pieces; see `StepCapture`."""
        return self._agreed(lambda: self._inner.capture_pieces(run))

    def _agreed(self, capture: Callable[[], T]) -> T:
        """Return the captured call or pieces if all ranks could capture them."""
        error: RuntimeError | None = None
        try:
            found = capture()
        except RuntimeError as caught:
            error = caught
        is_captured = self._ranks.is_true_of_all(error is None)
        if error is not None:
            raise error
        if not is_captured:
            raise RuntimeError("another rank cannot capture it")
        return found


@contextmanager
def seen_sums(
    ranks: RankGroup, seen_launches: SeenLaunches, see: Callable[[Callable[[], None]], None]
) -> Iterator[None]:
    """Pass each kernel launch and each all-reduce that is made in this context to a function.

    On CPUs, an all-reduce is not a torch operator, so that a tape would miss it. See `SeenLaunches`.
    """
    transport = ranks.transport
    ranks.transport = _SeenTransport(transport, see)
    try:
        with seen_launches(see):
            yield
    finally:
        ranks.transport = transport


class _SeenTransport:
    """A transport whose all-reduces are launches, from the operand's memory to the result's."""

    def __init__(self, inner: Transport, see: Callable[[Callable[[], None]], None]) -> None:
        self.rank, self.size, self.name = inner.rank, inner.size, inner.name
        self._inner, self._see = inner, see

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See `Transport`; `x` is not changed, since the next replay may not write all of it again."""
        total = torch.empty_like(x)

        def launch() -> None:
            total.copy_(self._inner.all_reduce(x.clone(), residual))

        self._see(launch)
        return total

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor | None:
        """Refuse it: a captured step ends before the output head."""
        raise RuntimeError(f"a captured call gathers columns of other ranks ({len(part)} rows of {sum(widths)})")

    def send(self, message: Any) -> None:
        """Refuse it, as `gather`."""
        raise RuntimeError(f"a captured call sends {len(message)} bytes to other ranks")

    def receive(self) -> Tensor:
        """Refuse it, as `gather`."""
        raise RuntimeError("a captured call waits for rank 0")

    def fail(self, rank: int) -> None:
        """See `Transport`."""
        self._inner.fail(rank)

    def close(self) -> None:
        """See `Transport`."""
        self._inner.close()
