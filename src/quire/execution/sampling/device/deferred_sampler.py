"""A sampler that leaves tokens on the device: the host launches the next step before it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import repeat
from typing import cast

import torch
from torch import Tensor

from quire.execution.capture.decode_rows import drawn_rows_of
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.sampling.device.device_sampler import DeviceSampler, DrawnRows
from quire.execution.sampling.logits_processing import KeepTokens
from quire.execution.sampling.sampler import plain_results
from quire.execution.sampling.token_history import TokenHistory
from quire.execution.step.pinned import HostCopy
from quire.ops.interface.token_draws import BROKEN, FINE, DrawsTokens
from quire.scheduling.decode_columns import DecodeItems, seq_ids_of
from quire.scheduling.plan import ItemResult, ScheduledSequence, StepPlan
from quire.text.structured.mask_filler import GrammarStates


class DeferredSampler(DeviceSampler):
    """Samples the same tokens as `DeviceSampler`, but those that are sampled on the device are read later.

    Results of such rows are empty when `sample` returns, and come from `DeferredTokens`; all others are complete.
    """

    def __init__(
        self,
        device: torch.device,
        grammar_states: GrammarStates | None,
        keep: KeepTokens,
        deferred: DeferredTokens,
        draws: DrawsTokens | None = None,
    ) -> None:
        super().__init__(device, grammar_states, keep, draws)
        self._deferred = deferred
        # Empty results of the last step's rows, with their sequence ids: usually the next step has the same.
        self._empty: tuple[list[int], list[ItemResult]] = [], []

    def begin_step(self, plan: StepPlan) -> None:
        """See `Sampler`; a plan of decodes opens no sequence."""
        if not isinstance(plan.items, DecodeItems):
            super().begin_step(plan)
            return
        for seq_id in plan.finished_ids:
            self._close(seq_id)
        self.begin(plan.items)

    def _sample_own(
        self, logits: Tensor, items: Sequence[ScheduledSequence], positions: Tensor | None = None
    ) -> list[ItemResult]:
        return self._defer(items, *self._draw(logits, items, positions))

    def take_likeliest(
        self, greatest: Tensor, chosen: Tensor, items: Sequence[ScheduledSequence]
    ) -> list[ItemResult] | None:
        """See `Sampler`; these tokens too stay on the device."""
        found = torch.stack((chosen, torch.where(greatest.isfinite(), FINE, BROKEN)))
        if len(chosen) != len(items):
            return self._take_runs(items, DrawnRows(drawn_rows_of(items), found, {}))
        return self._defer(items, found, {}, (), None)

    def _take_runs(self, items: Sequence[ScheduledSequence], drawn: DrawnRows) -> list[ItemResult]:
        """See `DeviceSampler`: the rows are read later."""
        found, measures = cast(Tensor, drawn.found), cast(Tensor | None, drawn.measures)
        later = drawn._replace(found=HostCopy(found), measures=None if measures is None else HostCopy(measures))
        self._deferred.add_read(partial(self._runs, items, later))
        return plain_results(seq_ids_of(items), repeat(()))

    def _put_drawn(self, token_ids: Tensor, items: Sequence[ScheduledSequence]) -> None:
        self._deferred.put(token_ids, items, range(len(items)))

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
        histories = [self._with_history.get(item.seq_id) for item in items] if self._with_history else ()
        self._deferred.add(items, found[0], partial(self._read, drawn, histories))
        seq_ids = seq_ids_of(items)
        if seq_ids is not self._empty[0] and seq_ids != self._empty[0]:
            self._empty = seq_ids, plain_results(seq_ids, repeat(()))
        return self._empty[1].copy()

    def _read(self, drawn: DrawnRows, histories: Sequence[TokenHistory | None]) -> Sequence[ItemResult]:
        """Read the tokens of rows, add them to the histories of their sequences, and return the results of the items.

        The next step has begun meanwhile, and may have closed a sequence: then its history is unused.
        """
        results = self._results(drawn)
        if not histories:
            return results
        for item, history, result in zip(drawn.items, histories, results, strict=False):
            if history is not None and result.token_ids:
                history.add_drawn(item.start + len(item.token_ids), result.token_ids[0])
        return results
