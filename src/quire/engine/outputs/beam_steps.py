"""What a step's candidates become: texts are looked at for stop strings, and the searches go on or end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.engine.outputs.output_processor import RequestState
from quire.scheduling.plan import BeamGroup, Candidate
from quire.scheduling.scheduler import Scheduler
from quire.sequences.edits import Append


def take_candidates(
    scheduler: Scheduler,
    request_states: Mapping[str, RequestState],
    groups: Sequence[BeamGroup],
    found: Sequence[tuple[Candidate, ...]],
    now_s: float,
) -> tuple[int, list[RequestState]]:
    """Take in the candidates of all searches, after all else of the step.

    Args:
        scheduler: advances the beams.
        transcripts: of the requests that have not ended, by id.
        groups: of the plan that was executed.
        found: the candidates of each.
        now_s: when they came.

    Returns:
        How many tokens beams were given, and the transcripts of the requests that are over.
    """
    num_chosen = 0
    over: dict[str, RequestState] = {}
    stopped = [
        _find_stops(scheduler, request_states, group, candidates)
        for group, candidates in zip(groups, found, strict=True)
    ]
    for _, sequence, edit, _ in scheduler.advance_beams(groups, stopped):
        request_id = sequence.request.request_id
        request_state = request_states[request_id]
        if not isinstance(edit, Append):
            request_state.add_finish(sequence)
            over[request_id] = request_state
            continue
        num_chosen += 1
        assert request_state.beams is not None, "a beam of a request without a search"
        request_state.beams.follow(edit.sample_idx, edit.draw_idx)
        if request_state.metrics.first_token_s is None:
            request_state.metrics.first_token_s = now_s
    return num_chosen, list(over.values())


def _find_stops(
    scheduler: Scheduler,
    request_states: Mapping[str, RequestState],
    group: BeamGroup,
    candidates: tuple[Candidate, ...],
) -> tuple[Candidate, ...]:
    """Return candidates with the stop strings that they reach."""
    beams = [scheduler.sequences[seq_id] for seq_id in group.seq_ids if seq_id in scheduler.sequences]
    texts = request_states[beams[0].request.request_id].beams if beams else None
    return candidates if texts is None else texts.find_stops(beams, candidates)
