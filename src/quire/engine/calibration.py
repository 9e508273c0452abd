"""How fast the data plane is, for the choice between computing tokens again and moving or loading their blocks."""

from __future__ import annotations

from dataclasses import replace

from quire.scheduling.preemption import SwapCosts

# What a step's weight has become when so many more tokens were computed: the rate follows the load within seconds.
MEMORY_TOKENS = 20_000


class Calibration:
    """Measures the rates that preemption and loads from disk reckon with.

    Args:
        copy_bytes_per_s: as measured by the data plane at its start; None where nothing is ever swapped.

    Attributes:
        costs: the rates as they are known now.
        tokens_per_s: computed when many are at once; None until that was measured.
    """

    def __init__(self, copy_bytes_per_s: float | None) -> None:
        self.costs = SwapCosts() if copy_bytes_per_s is None else SwapCosts(copy_bytes_per_s=copy_bytes_per_s)
        self.tokens_per_s: float | None = None
        self._tokens = 0.0
        self._seconds = 0.0

    def note_step(self, num_tokens: int, num_items: int, elapsed_s: float) -> None:
        """Take in how long a step took; one that mostly decodes says nothing about many tokens at once.

        Args:
            num_tokens: computed in the step.
            num_items: sequences that were part of it.
            elapsed_s: how long the data plane took.
        """
        if num_tokens < 2 * num_items or elapsed_s <= 0:
            return
        kept = MEMORY_TOKENS / (MEMORY_TOKENS + num_tokens)
        self._tokens = self._tokens * kept + num_tokens
        self._seconds = self._seconds * kept + elapsed_s
        self.tokens_per_s = self._tokens / self._seconds
        self.costs = replace(self.costs, prefill_tokens_per_s=self.tokens_per_s)
