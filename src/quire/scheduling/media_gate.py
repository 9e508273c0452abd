"""The interface of what decides whether the media of prompts can be computed yet."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from quire.sequences.sequence import Sequence


class MediaGate(Protocol):
    """Keeps sequences before media whose features are not in memory; what they lack is brought between steps."""

    def limits(self, running: Seq[Sequence]) -> dict[Sequence, int]:
        """Return the running sequences with media to compute, and how many of their next tokens a plan may have.

        A plan begins with this call.
        """

    def limit(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens of a sequence, from index `start` on, the present plan may have."""

    @property
    def is_closed(self) -> bool:
        """True if the last plan left out a token of a sequence because of its media."""
