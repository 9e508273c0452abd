"""The sampler of a rank whose tokens are drawn on another one."""

from __future__ import annotations

from collections.abc import Sequence

from quire.execution.sampling.sampler import Sampler
from quire.scheduling.decode_columns import DecodeItems
from quire.scheduling.plan import ScheduledSequence, StepPlan


class FollowingSampler(Sampler):
    """Keeps the parameters of open sequences, by which all ranks read the same rows, and draws nothing.

    Which drafts are accepted is not known here before the next plan, so histories and grammars are left alone.
    """

    def begin_step(self, plan: StepPlan) -> None:
        """See `Sampler`; a plan of decodes opens no sequence."""
        super().begin_step(plan._replace(items=()) if isinstance(plan.items, DecodeItems) else plan)

    def begin(self, items: Sequence[ScheduledSequence]) -> None:
        """Leave histories and grammars as they are; see `Sampler`."""
