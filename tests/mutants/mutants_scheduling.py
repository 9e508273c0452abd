"""Mutants of the scheduler and of beam search."""

from __future__ import annotations

from typing import Any

from quire.memory import KVCacheManager
from quire.scheduling import Scheduler, beam_groups
from quire.scheduling.preemption import Preemption
from quire.scheduling.queues import Queues
from quire.scheduling.registry import SequenceRegistry
from quire.sequences import FinishReason, Request, Sequence
from quire.sequences.decoding import Append, Fork, beams
from tests.memory.checkers import audited_run, beam_reference, beam_run, media_run, scheduler_run
from tests.mutants.table import Mutant, replaced, returning


def close_silently(_: Any, __: Queues, sequence: Sequence) -> None:
    sequence.is_open = False


def reopen_without_media(honest: Any, scheduler: Scheduler, *args: Any) -> Any:
    plan = honest(scheduler, *args)
    preempted = {sequence.seq_id for sequence in scheduler.running if sequence.request.num_preemptions}
    items = (
        item._replace(new_sequence=item.new_sequence and item.new_sequence._replace(media=()))
        if item.seq_id in preempted
        else item
        for item in plan.items
    )
    return plan._replace(items=tuple(items))


def forget_scores(honest: Any, *args: Any) -> Any:
    return tuple(group._replace(scores=(0.0,) * len(group.scores)) for group in honest(*args))


def fork_first_survivor(honest: Any, *args: Any) -> list[Any]:
    edits = honest(*args)
    survivors = [edit.sample_idx for edit in edits if isinstance(edit, Append)]
    return [edit._replace(parent_idx=min(survivors)) if isinstance(edit, Fork) else edit for edit in edits]


def keep_dropped(honest: Any, registry: SequenceRegistry, sequence: Sequence, reason: FinishReason, *args: Any) -> None:
    if reason is not FinishReason.DROPPED:
        honest(registry, sequence, reason, *args)
        return
    with replaced(KVCacheManager, "free"):
        honest(registry, sequence, reason, *args)


def preempt_one(honest: Any, preemption: Preemption, sequence: Sequence) -> None:
    search, sequence.request.search = sequence.request.search, None
    honest(preemption, sequence)
    sequence.request.search = search


def keep_search(honest: Any, registry: SequenceRegistry, request: Request) -> None:
    search = request.search
    honest(registry, request)
    request.search = search


BEAMS = (beam_run, beam_reference)
SCHEDULING = (
    Mutant("preempted_sequence_not_closed", Queues, "close", close_silently, (scheduler_run, audited_run)),
    Mutant("slots_of_samples_not_counted", beam_groups, "slots_needed", returning(1), (audited_run, beam_run)),
    Mutant("reopened_without_media", Scheduler, "plan", reopen_without_media, (media_run,)),
    # ---- beam search ----
    Mutant("beam_scores_lost", beam_groups, "beam_groups_of", forget_scores, BEAMS),
    Mutant(
        "too_few_beam_candidates",
        beams,
        "num_candidates",
        lambda _, request: request.params.num_sequences // 2,
        BEAMS,
    ),
    Mutant("forked_from_wrong_beam", beams, "advance_beams", fork_first_survivor, BEAMS),
    Mutant("dropped_beam_not_freed", SequenceRegistry, "end", keep_dropped, BEAMS),
    Mutant(
        "beams_advance_one_by_one",
        beam_groups,
        "lockstep_group",
        lambda _, sequence: [sequence],
        (beam_run,),
    ),
    Mutant("one_beam_preempted_alone", Preemption, "preempt_by_recompute", preempt_one, (beam_run,)),
    Mutant("restarted_search_keeps_scores", SequenceRegistry, "restart", keep_search, (beam_run,)),
)
