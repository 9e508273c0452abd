"""Lockstep groups: in a step, either all sequences of a group get their slots, or none does.

The beams of a search are such a group. Any other sequence, the prompt of a search included, is a group by itself. The
beams of a search are always adjacent in the same queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq

from quire.memory.manager import KVCacheManager
from quire.scheduling.plan import BeamGroup
from quire.sequences.decoding.beams import num_candidates
from quire.sequences.sequence import Sequence


def lockstep_group(sequence: Sequence) -> list[Sequence]:
    """Return the unfinished sequences of a sequence's lockstep group, itself included, in the order of their queue."""
    request = sequence.request
    return [sequence] if request.search is None else request.unfinished


def lockstep_groups(queue: list[Sequence]) -> Iterator[list[Sequence]]:
    """Yield each group of a queue, in order; later sequences may leave the queue during the iteration."""
    start = 0
    while start < len(queue):
        group = lockstep_group(queue[start])
        yield group
        start += len(group)


def append_to_group(memory: KVCacheManager, group: Seq[Sequence], num_tokens: int) -> bool:
    """Append slots to each sequence of a group; return False, and change nothing, if blocks are lacking."""
    seq_ids = [sequence.seq_id for sequence in group]
    return memory.append_slots(seq_ids, num_tokens, atomic=len(group) > 1) > 0


def slots_needed(sequence: Sequence) -> int:
    """Return the number of the `max_num_seqs` slots that a sequence occupies.

    Samples and beams that are not forked yet count for the first unfinished sequence of their request.
    """
    request = sequence.request
    if request.search is None:
        num_samples = request.params.num_sequences
        return 1 if num_samples == 1 or request.is_forked else num_samples
    beams = request.unfinished
    return request.params.num_sequences - len(beams) + 1 if sequence is beams[0] else 1


def beam_groups_of(scheduled: Iterable[Sequence], num_samples: Iterable[int]) -> tuple[BeamGroup, ...]:
    """Return the beam groups of a step."""
    groups: dict[str, list[Sequence]] = {}
    for sequence, count in zip(scheduled, num_samples, strict=True):
        if count and sequence.request.search is not None:
            groups.setdefault(sequence.request.request_id, []).append(sequence)
    return tuple(map(_beam_group, groups.values()))


def beams_of(group: BeamGroup, sequences: Mapping[int, Sequence]) -> list[Sequence]:
    """Return the beams of a group by their ids; none if their request has ended."""
    return [sequences[seq_id] for seq_id in group.seq_ids if seq_id in sequences]


def _beam_group(beams: list[Sequence]) -> BeamGroup:
    request = beams[0].request
    assert request.search is not None
    scores = tuple(request.search.scores[beam.sample_idx] for beam in beams)
    return BeamGroup(tuple(beam.seq_id for beam in beams), scores, num_candidates(request))
