"""Bugs of beam search put in on purpose: a run of searches that crowd each other must catch them, or the twin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from quire.decoding import Append, Fork
from quire.decoding import beams as decoding
from quire.errors import InvariantViolation
from quire.memory.tables import append as slots
from quire.memory.tables.append import count_growth
from quire.scheduling import admission, beam_groups, scheduler
from quire.scheduling.beam_groups import beam_groups_of
from quire.scheduling.preemption import Preemption
from quire.scheduling.registry import SequenceRegistry
from quire.sequences import FinishReason, Sequence
from tests.scheduling.rig import Rig, Setting, outputs_of, run
from tests.scheduling.test_random_runs import crowd, found_slowly

Patch = pytest.MonkeyPatch
# A broken table may also end in a look-up that finds nothing, or in a command that memory refuses.
TEARS = (AssertionError, InvariantViolation, LookupError, ValueError)


def crowded_run() -> None:
    """Searches and samples that have room for little more than one of them, audited at every step."""
    jobs = crowd()
    for mode, host_blocks in (("recompute", 0), ("swap", 90)):
        setting = Setting(num_blocks=36, max_num_seqs=24, preemption_mode=mode, host_blocks=host_blocks)
        outcome = run(jobs, setting)
        for seed, (job, found) in enumerate(zip(jobs, outcome.outputs, strict=True)):
            assert job.beam_width is None or found == found_slowly(job, seed)


def undisturbed_twin() -> None:
    """Each search alone against the one on lists."""
    for seed, job in enumerate(crowd()):
        if job.beam_width is not None:
            rig = Rig(Setting())
            request = rig.add(job, seed)
            while rig.scheduler.has_unfinished:
                rig.step()
            assert outputs_of(request) == found_slowly(job, seed)


NETS = (crowded_run, undisturbed_twin)


def forget_the_scores(patch: Patch) -> None:
    def without_scores(scheduled: Any, num_samples: Any) -> Any:
        return tuple(
            group._replace(scores=(0.0,) * len(group.scores)) for group in beam_groups_of(scheduled, num_samples)
        )

    patch.setattr(scheduler, "beam_groups_of", without_scores)


def ask_for_too_few_candidates(patch: Patch) -> None:
    patch.setattr(beam_groups, "num_candidates", lambda request: request.params.num_sequences // 2)


def fork_from_another_beam(patch: Patch) -> None:
    advance = decoding.advance_beams

    def advance_wrongly(search: Any, beams: Any, candidates: Any) -> list[Any]:
        edits = advance(search, beams, candidates)
        survivors = [edit.sample_idx for edit in edits if isinstance(edit, Append)]
        return [edit._replace(parent_idx=min(survivors)) if isinstance(edit, Fork) else edit for edit in edits]

    patch.setattr(decoding, "advance_beams", advance_wrongly)


def keep_what_is_given_up(patch: Patch) -> None:
    end = SequenceRegistry.end

    def end_without_freeing(registry: SequenceRegistry, sequence: Sequence, reason: FinishReason, *more: Any) -> None:
        free = registry._memory.free
        if reason is FinishReason.DROPPED:
            registry._memory.free = lambda *_, **__: None  # type: ignore[method-assign]
        try:
            end(registry, sequence, reason, *more)
        finally:
            registry._memory.free = free  # type: ignore[method-assign]

    patch.setattr(SequenceRegistry, "end", end_without_freeing)


def advance_beams_one_by_one(patch: Patch) -> None:
    patch.setattr(beam_groups, "lockstep_group", lambda sequence: [sequence])


def foretell_no_copies(patch: Patch) -> None:
    def without_copies(tables: Any, states: Any) -> list[int]:
        size = tables.groups[0].spec.block_size
        return [
            min(need, sum(state.num_slots % size == 0 for state in states)) for need in count_growth(tables, states)
        ]

    patch.setattr(slots, "count_growth", without_copies)


def count_the_last_holder_too(patch: Patch) -> None:
    def one_more(tables: Any, states: Any) -> list[int]:
        tails = Counter(state.tables[0][-1] for state in states if state.num_slots % 4)
        return [need + sum(count > 1 for count in tails.values()) for need in count_growth(tables, states)]

    patch.setattr(slots, "count_growth", one_more)


def give_no_slots_to_beams(patch: Patch) -> None:
    patch.setattr(admission, "slots_needed", lambda _: 1)


def take_one_beam_alone(patch: Patch) -> None:
    preempt = Preemption.preempt_by_recompute

    def preempt_one(preemption: Preemption, sequence: Sequence) -> None:
        search, sequence.request.search = sequence.request.search, None
        preempt(preemption, sequence)
        sequence.request.search = search

    patch.setattr(Preemption, "preempt_by_recompute", preempt_one)


def go_on_where_it_began_again(patch: Patch) -> None:
    begin = SequenceRegistry._begin

    def begin_with_old_scores(registry: SequenceRegistry, request: Any) -> None:
        search = request.search
        begin(registry, request)
        request.search = search or request.search

    patch.setattr(SequenceRegistry, "_begin", begin_with_old_scores)


CAUGHT: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (forget_the_scores, NETS),
    (ask_for_too_few_candidates, NETS),
    (fork_from_another_beam, NETS),
    (keep_what_is_given_up, NETS),
    (advance_beams_one_by_one, (crowded_run,)),
    (foretell_no_copies, (crowded_run,)),
    (count_the_last_holder_too, (crowded_run,)),
    (give_no_slots_to_beams, (crowded_run,)),
    (take_one_beam_alone, (crowded_run,)),
    (go_on_where_it_began_again, (crowded_run,)),
]


@pytest.mark.parametrize(
    ("seed_bug", "net"),
    [pytest.param(bug, net, id=f"{bug.__name__} - {net.__name__}") for bug, nets in CAUGHT for net in nets],
)
def test_the_net_catches_the_bug(
    monkeypatch: Patch, seed_bug: Callable[[Patch], None], net: Callable[[], None]
) -> None:
    seed_bug(monkeypatch)
    with pytest.raises(TEARS):
        net()


@pytest.mark.parametrize("net", NETS)
def test_honest_code_passes_the_net(net: Callable[[], None]) -> None:
    net()
