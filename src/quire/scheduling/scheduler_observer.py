"""The interface of observers of a scheduler's commands."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from quire.memory.prefix.token_chain import TokenChain
from quire.scheduling.plan import Candidate, ItemResult, ScheduledSequence, StepPlan
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason


class SchedulerObserver(Protocol):
    """Receives each command; a method with a command's name is called before the command takes effect.

    Its arguments have the same meaning as in `Scheduler`. An observer changes nothing.
    """

    def add(self, request: Request) -> None:
        """The request passed the scheduler's checks; an error from here refuses it."""

    def abort(self, request_id: str, reason: FinishReason) -> None: ...

    def plan(self, tick: int) -> None: ...

    def plan_ahead(self, tick: int) -> None: ...

    def planned(self, plan: StepPlan) -> None:
        """Called after `plan`, and after `plan_ahead` if it made a plan."""

    def update_from_results(self, items: Seq[ScheduledSequence], results: Seq[ItemResult]) -> None: ...

    def finish_at_stop_string(self, sequence: Sequence, stop: str) -> None: ...

    def advance_beams(self, found: Seq[tuple[Candidate, ...]]) -> None: ...

    def reset_prefix_cache(self) -> None: ...

    def pinned(self, name: str, chain: TokenChain, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the chain are pinned now."""

    def unpinned(self, name: str) -> None: ...
