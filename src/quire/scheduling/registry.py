"""Registry of unfinished requests and their sequences: it creates, forks and ends sequences."""

from __future__ import annotations

from quire.memory.manager import KVCacheManager
from quire.scheduling.policies import Order
from quire.scheduling.queues import Queues
from quire.sequences.beams import BeamSearch
from quire.sequences.decoding.strategies import default_edit_of, strategy_of
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason, SequenceStatus

# Finish reasons of sequences whose partial last block is not published.
_WITHOUT_TAIL = frozenset({FinishReason.ERROR, FinishReason.DROPPED})


class SequenceRegistry:
    """Unfinished requests and sequences."""

    def __init__(self, memory: KVCacheManager, queues: Queues, order: Order) -> None:
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.num_searches = 0
        self._memory = memory
        self._queues = queues
        self._order = order
        self._next_seq_id = 0

    def add(self, request: Request) -> None:
        """Add a request; its prompt waits."""
        request.order_key = self._order.key_of(request)
        self.requests[request.request_id] = request
        self.num_searches += request.params.beam_width is not None
        self._begin(request)

    def remove(self, request: Request) -> None:
        """Remove a request whose sequences have ended; an unknown request is ignored."""
        if self.requests.pop(request.request_id, None) is not None:
            self.num_searches -= request.params.beam_width is not None

    def restart(self, request: Request) -> None:
        """Restart a beam search from its prompt, which waits again; a search has emitted no output yet."""
        for beam in request.unfinished:
            self.end(beam, FinishReason.DROPPED)
        request.sequences.clear()
        self._begin(request)

    def fork(self, parent: Sequence, sample_idx: int) -> None:
        """Create another sample of a request as a copy of a running sequence, which shares its blocks."""
        child = self._open(parent.request, sample_idx, parent.tokens.copy(), parent)
        child.num_computed = parent.num_computed
        child.move_to(SequenceStatus.RUNNING)
        self._queues.enter(child)

    def end(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Finish a sequence and free its memory (S4)."""
        if sequence.status is not SequenceStatus.WAITING:
            is_sound = reason not in _WITHOUT_TAIL
            self._memory.free(sequence.seq_id, retain=sequence.request.retain_cache, is_sound=is_sound)
            self._queues.close(sequence)
        self._queues.move(sequence, SequenceStatus.FINISHED)
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        del self.sequences[sequence.seq_id]

    def _begin(self, request: Request) -> None:
        if request.params.beam_width is not None:
            request.search = BeamSearch()
        self._queues.enter(self._open(request, 0, list(request.prompt_token_ids)))

    def _open(self, request: Request, sample_idx: int, tokens: list[int], parent: Sequence | None = None) -> Sequence:
        """Create a sequence, forked from the parent if one is given."""
        seq_id = self._next_seq_id
        self._next_seq_id += 1
        if parent is None:
            chain = self._memory.chain(tokens, request.namespace, [media.span for media in request.media])
        else:
            chain = self._memory.fork(parent.seq_id, seq_id, tokens)
        key = (*request.order_key, sample_idx)
        strategy = strategy_of(request)
        default_edit = default_edit_of(strategy, sample_idx)
        sequence = Sequence(seq_id, request, sample_idx, tokens, chain, key, strategy, default_edit)
        # A beam replaces the dropped one of the same index.
        request.sequences[sample_idx : sample_idx + 1] = [sequence]
        self.sequences[seq_id] = sequence
        return sequence
