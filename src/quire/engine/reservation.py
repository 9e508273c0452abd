"""Places in the waiting queue, held for requests to come."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self


class Reservation:
    """Places in the waiting queue, held before any work is done for a request; unused ones return on exit.

    Args:
        return_places: takes back so many.
        count: how many are held.
    """

    def __init__(self, return_places: Callable[[int], None], count: int) -> None:
        self._return_places = return_places
        self._count = count

    def take(self) -> None:
        """Use one place; from now on the request itself counts as waiting.

        Raises:
            ValueError: none is left.
        """
        if not self._count:
            raise ValueError("more requests than reserved places")
        self._count -= 1
        self._return_places(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._return_places(self._count)
        self._count = 0
