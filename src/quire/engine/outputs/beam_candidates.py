"""What a step's candidates become: texts are looked at for stop strings, and the searches go on or end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.engine.outputs.output_processor import RequestTranscript
from quire.scheduling.plan import BeamGroup, Candidate
from quire.scheduling.scheduler import Scheduler
from quire.sequences.edits import Append


def take_candidates(
    scheduler: Scheduler,
    transcripts: Mapping[str, RequestTranscript],
    groups: Sequence[BeamGroup],
    found: Sequence[tuple[Candidate, ...]],
    now_s: float,
) -> tuple[int, list[RequestTranscript]]:
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
    over: dict[str, RequestTranscript] = {}
    stopped = [
        _find_stops(scheduler, transcripts, group, candidates) for group, candidates in zip(groups, found, strict=True)
    ]
    for _, sequence, edit, _ in scheduler.advance_beams(groups, stopped):
        request_id = sequence.request.request_id
        transcript = transcripts[request_id]
        if not isinstance(edit, Append):
            transcript.add_finish(sequence)
            over[request_id] = transcript
            continue
        num_chosen += 1
        assert transcript.beams is not None, "a beam of a request without a search"
        transcript.beams.follow(edit.sample_idx, edit.draw_idx)
        if transcript.metrics.first_token_s is None:
            transcript.metrics.first_token_s = now_s
    return num_chosen, list(over.values())


def _find_stops(
    scheduler: Scheduler,
    transcripts: Mapping[str, RequestTranscript],
    group: BeamGroup,
    candidates: tuple[Candidate, ...],
) -> tuple[Candidate, ...]:
    """Return candidates with the stop strings that they reach."""
    beams = [scheduler.sequences[seq_id] for seq_id in group.seq_ids if seq_id in scheduler.sequences]
    texts = transcripts[beams[0].request.request_id].beams if beams else None
    return candidates if texts is None else texts.find_stops(beams, candidates)
