"""The beams of a search, which go through the scheduler as one: all of them advance in a step, or none does."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import takewhile

from quire.decoding.beams import advance_beams, num_candidates
from quire.errors import PromptTooLong
from quire.memory.manager import KVCacheManager
from quire.scheduling.plan import BeamGroup, Candidate
from quire.scheduling.roster import Roster
from quire.sequences.edits import Append, Drop, Finish, Fork
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason


def gang_at(queue: list[Sequence], position: int) -> list[Sequence]:
    """Return the beams that stand side by side in a queue from a position on: those of one search are never apart."""
    request = queue[position].request
    return list(takewhile(lambda sequence: sequence.request is request, queue[position:]))


def seats_of(sequence: Sequence) -> int:
    """Return the places among those that run at once that a sequence takes: of all its request still needs, its own.

    What samples and beams that are not there yet will take is counted for the first of those that are.
    """
    request = sequence.request
    if request.search is None:
        return 1 if request.is_forked else request.params.num_sequences
    beams = request.unfinished
    return request.params.num_sequences - len(beams) + 1 if sequence is beams[0] else 1


def refuse_what_never_fits(memory: KVCacheManager, request: Request) -> None:
    """Raise where memory could not hold a request by itself; a search with all its beams apart behind the prompt.

    Raises:
        PromptTooLong: with the longest prompt for which there is room.
    """
    num_output = request.max_total_tokens - request.num_prompt
    width = request.params.beam_width or 1

    def is_too_long(num_prompt: int) -> bool:
        return not memory.capacity.can_ever_hold(num_prompt + num_output, width=width, num_shared=num_prompt)

    if not is_too_long(request.num_prompt):
        return
    # Of prompts that end just before a block does, those that fit come before those that do not. All that are shorter
    # than the last one that fits do too.
    size = memory.block_size
    ends = range(size - 1, request.num_prompt + size, size)
    limit = max(0, ends[0] + size * (bisect_left(ends, True, key=is_too_long) - 1))
    limit = next(length for length in range(limit, request.num_prompt) if is_too_long(length + 1))
    beams = "" if width == 1 else f", for each of {width} beams"
    raise PromptTooLong(request.num_prompt, limit, f"the KV cache (with room for the output asked for{beams})")


def groups_of(granted: Iterable[Sequence], num_samples: Iterable[int]) -> tuple[BeamGroup, ...]:
    """Return the groups of a step.

    Args:
        granted: who is part of it, the beams of a search side by side.
        num_samples: of each, tokens to draw; of a prompt that is not at its end 0.
    """
    gangs: dict[str, list[Sequence]] = {}
    for sequence, count in zip(granted, num_samples, strict=True):
        if count and sequence.request.search is not None:
            gangs.setdefault(sequence.request.request_id, []).append(sequence)
    return tuple(_group_of(gang) for gang in gangs.values())


def _group_of(gang: list[Sequence]) -> BeamGroup:
    request = gang[0].request
    assert request.search is not None
    scores = tuple(request.search.scores[beam.sample_idx] for beam in gang)
    return BeamGroup(tuple(beam.seq_id for beam in gang), scores, num_candidates(request))


def advance_gang(
    roster: Roster, group: BeamGroup, candidates: tuple[Candidate, ...]
) -> list[tuple[Sequence, Append | Finish]]:
    """Take in a group's candidates: beams are given up, then forked, then they grow; or the search ends.

    Returns:
        What happened, in order; nothing where the request has ended meanwhile.
    """
    beams = [roster.sequences[seq_id] for seq_id in group.seq_ids if seq_id in roster.sequences]
    if len(beams) < len(group.seq_ids):
        return []
    request = beams[0].request
    assert request.search is not None
    news: list[tuple[Sequence, Append | Finish]] = []
    places = request.sequences
    for edit in advance_beams(request.search, beams, candidates):
        if isinstance(edit, Append):
            places[edit.sample_idx].tokens.append(candidates[edit.draw_idx].token_id)
            news.append((places[edit.sample_idx], edit))
        elif isinstance(edit, Fork):
            roster.fork(places[edit.parent_idx], edit.sample_idx)
        elif isinstance(edit, Drop):
            roster.end(places[edit.sample_idx], FinishReason.DROPPED)
        elif isinstance(edit, Finish):
            roster.end(places[edit.sample_idx], edit.reason)
            news.append((places[edit.sample_idx], edit))
    if request.is_finished:
        roster.remove(request)
    return news
