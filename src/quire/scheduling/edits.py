"""Edits of sequences: tokens are appended, samples and beams forked, drafts rolled back, sequences ended."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.scheduling.beam_groups import beams_of
from quire.scheduling.drafts import DraftSlots
from quire.scheduling.plan import BeamGroup, Candidate
from quire.scheduling.registry import SequenceRegistry
from quire.sequences.decoding import beams as beam_search
from quire.sequences.sequence import Sequence
from quire.sequences.status import FinishReason
from quire.sequences.strategy import Append, BeamEdit, Drop, Edit, Fail, Finish, Fork, Truncate

# Index of the item (or beam group) in the step, the sequence, its edit, and its number of tokens after the edit.
SequenceEvent = tuple[int, Sequence, Append | Finish | Fail, int]


class SequenceEdits:
    """Applies the edits of strategies, and ends sequences."""

    __slots__ = ("_drafts", "_registry")

    def __init__(self, registry: SequenceRegistry, drafts: DraftSlots) -> None:
        self._registry = registry
        self._drafts = drafts

    def apply(
        self, idx: int, sequence: Sequence, token_ids: Seq[int], edits: Iterable[Edit | BeamEdit]
    ) -> list[SequenceEvent]:
        """Apply edits to a request's sequences one by one (`edits` may be lazy); return the events in order."""
        events: list[SequenceEvent] = []
        samples = sequence.request.sequences
        for edit in edits:
            if isinstance(edit, Append):
                target = samples[edit.sample_idx]
                target.tokens.append(token_ids[edit.draw_idx])
                events.append((idx, target, edit, len(target.tokens)))
            elif isinstance(edit, Fork):
                self._registry.fork(samples[edit.parent_idx], edit.sample_idx)
            elif isinstance(edit, Truncate):
                self._drafts.commit(samples[edit.sample_idx], edit.num_tokens)
            elif isinstance(edit, Drop):
                self._registry.end(samples[edit.sample_idx], FinishReason.DROPPED)
            elif isinstance(edit, Finish):
                target = samples[edit.sample_idx]
                self.finish(target, edit.reason, edit.stop_reason)
                events.append((idx, target, edit, len(target.tokens)))
            else:
                events.append((idx, sequence, edit, len(sequence.tokens)))
        return events

    def advance_beams(self, groups: Seq[BeamGroup], found: Seq[tuple[Candidate, ...]]) -> list[SequenceEvent]:
        """Apply the candidates of searches, best first; see `Scheduler.advance_beams`."""
        events: list[SequenceEvent] = []
        for idx, (group, candidates) in enumerate(zip(groups, found, strict=True)):
            beams = beams_of(group, self._registry.sequences)
            if len(beams) == len(group.seq_ids):
                search = beams[0].request.search
                assert search is not None
                edits = beam_search.advance_beams(search, beams, candidates)
                events += self.apply(idx, beams[0], [candidate.token_id for candidate in candidates], edits)
        return events

    def finish_at_stop_string(self, sequence: Sequence, stop: str) -> None:
        """See `Scheduler.finish_at_stop_string`."""
        if sequence.is_finished:
            sequence.finish_reason, sequence.stop_reason = FinishReason.STOP, stop
        else:
            self.finish(sequence, FinishReason.STOP, stop)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence and free its memory; remove the request with its last sequence."""
        self._end(sequence, reason, stop_reason)
        if sequence.request.is_finished:
            self._registry.remove(sequence.request)

    def abort(self, request_id: str, reason: FinishReason) -> list[Sequence]:
        """End a request; see `Scheduler.abort`."""
        request = self._registry.requests.get(request_id)
        if request is None:
            return []
        ended = request.unfinished
        for sequence in ended:
            self._end(sequence, reason)
        self._registry.remove(request)
        return ended

    def _end(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self._registry.end(sequence, reason, stop_reason)
        if self._drafts.drafter is not None:
            self._drafts.drafter.forget(sequence)
