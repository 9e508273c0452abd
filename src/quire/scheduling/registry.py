"""Who there is: requests and their sequences, how those begin, fork and end."""

from __future__ import annotations

from quire.decoding.strategies import default_edit_of, strategy_of
from quire.memory.manager import KVCacheManager
from quire.scheduling.policies import Order
from quire.scheduling.queues import Queues
from quire.sequences.beams import BeamSearch
from quire.sequences.sequence import Request, Sequence
from quire.sequences.status import FinishReason, SequenceStatus

# The ends of sequences whose last block nobody will ask for.
_WITHOUT_TAIL = frozenset({FinishReason.ERROR, FinishReason.DROPPED})


class SequenceRegistry:
    """Opens sequences and ends them.

    Args:
        memory: the manager.
        queues: of the scheduler.
        order: gives a request its place in the queues.

    Attributes:
        requests: those that are not finished, by id.
        sequences: theirs that are not, by id.
        num_searches: requests that search with beams.
    """

    def __init__(self, memory: KVCacheManager, queues: Queues, order: Order) -> None:
        self.requests: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self.num_searches = 0
        self._memory = memory
        self._queues = queues
        self._order = order
        self._next_seq_id = 0

    def add(self, request: Request) -> None:
        """Take a request in: its prompt waits."""
        request.order_key = self._order.key_of(request)
        self.requests[request.request_id] = request
        self.num_searches += request.params.beam_width is not None
        self._begin(request)

    def remove(self, request: Request) -> None:
        """Forget a request whose sequences have ended; one that is not known is left alone."""
        if self.requests.pop(request.request_id, None) is not None:
            self.num_searches -= request.params.beam_width is not None

    def restart(self, request: Request) -> None:
        """Have a search begin again from its prompt, which waits: nobody has seen anything of it yet."""
        for beam in request.unfinished:
            self.end(beam, FinishReason.DROPPED)
        request.sequences.clear()
        self._begin(request)

    def fork(self, parent: Sequence, sample_idx: int) -> None:
        """Open another sample of a request as a copy of a running sequence; its blocks are shared."""
        child = self._open(parent.request, sample_idx, parent.tokens.copy(), parent)
        child.num_computed = parent.num_computed
        child.move_to(SequenceStatus.RUNNING)
        self._queues.enter(child)

    def end(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Finish a sequence; it holds nothing afterwards (S4)."""
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
        """Make a sequence, forked from a parent where there is one."""
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
        # A beam takes the place of one that was given up.
        request.sequences[sample_idx : sample_idx + 1] = [sequence]
        self.sequences[seq_id] = sequence
        return sequence
