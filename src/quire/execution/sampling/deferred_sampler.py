"""A sampler that leaves tokens on the device: the host launches the next step before it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quire.execution.deferred_tokens import DeferredTokens
from quire.execution.pinned import HostCopy
from quire.execution.sampling.device_sampler import BROKEN, FINE, DeviceSampler, DrawnRows
from quire.execution.sampling.logits_processing import KeepTokens
from quire.scheduling.plan import ItemResult, ScheduledSequence
from quire.structured.mask_filler import GrammarStates


class DeferredSampler(DeviceSampler):
    """Chooses the tokens that `DeviceSampler` does. Those that it draws on the device are read later.

    Their results are empty when `sample` returns, and come from `DeferredTokens`; all others are complete.

    Args:
        device, grammar_states, keep: see `Sampler`.
        deferred: keeps the tokens.
    """

    def __init__(
        self, device: torch.device, grammar_states: GrammarStates | None, keep: KeepTokens, deferred: DeferredTokens
    ) -> None:
        super().__init__(device, grammar_states, keep)
        self._deferred = deferred

    def sample(self, logits: Tensor, items: Sequence[ScheduledSequence]) -> list[ItemResult]:
        """Draw every item's tokens; see `Sampler`."""
        if len(logits) == len(items) and self.is_greedy(items):
            greatest, chosen = logits.max(-1)
            status = torch.where(greatest.isfinite(), FINE, BROKEN)
            return self._defer(items, torch.stack((chosen, status), 1), {}, [], None)
        return super().sample(logits, items)

    def _sample_own(self, logits: Tensor, items: Sequence[ScheduledSequence]) -> list[ItemResult]:
        return self._defer(items, *self._draw(logits, items))

    def _defer(
        self,
        items: Sequence[ScheduledSequence],
        found: Tensor,
        errors: dict[int, str | None],
        measured: Sequence[tuple[int, int]],
        measures: Tensor | None,
    ) -> list[ItemResult]:
        """Keep the tokens of items; see `DrawnRows`."""
        later = None if measures is None else HostCopy(measures)
        drawn = DrawnRows(items, HostCopy(found), errors, measured, later)
        self._deferred.add(items, found[:, 0], partial(self._results, drawn))
        return [ItemResult(item.seq_id, ()) for item in items]
