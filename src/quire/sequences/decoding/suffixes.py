"""Suffix decoding: drafts from earlier outputs of the same namespace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.memory.prefix.token_chain import Namespace
from quire.sequences.decoding.automaton import ROOT, SuffixAutomaton
from quire.sequences.decoding.lookup import NgramIndex
from quire.sequences.sequence import Sequence

# Maximum length of a match with a sequence's last tokens.
REACH = 32
# A segment takes at most this fraction (1 / SHARE) of the memory; a segment is evicted as a whole.
SHARE = 4
# Estimated maximum memory of a token: two states, each with its own table.
MAX_BYTES_PER_TOKEN = 1000


class OutputHistory:
    """Earlier outputs of each namespace, in bounded memory.

    Outputs are added to the last segment of their namespace until it is full. When all segments together exceed the
    limit, the least recently extended segment of all namespaces is evicted.
    """

    def __init__(self, num_bytes: int) -> None:
        self._limit_bytes = num_bytes
        self._max_tokens = max(1, num_bytes // (SHARE * MAX_BYTES_PER_TOKEN))
        # Segments by namespace and number, the most recently extended last; and the numbers by namespace.
        self._segments: OrderedDict[tuple[Namespace, int], SuffixAutomaton] = OrderedDict()
        self._numbers: dict[Namespace, list[int]] = {}
        self._num_made = 0
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Estimated memory of all segments, in bytes."""
        return self._num_bytes

    def add(self, namespace: Namespace, tokens: Seq[int]) -> None:
        """Add an output; an output that exceeds a segment is cut to its last tokens."""
        tokens = tokens[-self._max_tokens :]
        numbers = self._numbers.setdefault(namespace, [])
        key = namespace, numbers[-1] if numbers else -1
        if not numbers or self._segments[key].num_bytes * SHARE > self._limit_bytes:
            key = namespace, self._num_made
            self._num_made += 1
            numbers.append(key[1])
            self._segments[key] = SuffixAutomaton()
            self._num_bytes += self._segments[key].num_bytes
        segment = self._segments[key]
        before = segment.num_bytes
        segment.add(tokens)
        self._num_bytes += segment.num_bytes - before
        self._segments.move_to_end(key)
        while self._num_bytes > self._limit_bytes:
            (owner, number), oldest = self._segments.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            self._numbers[owner].remove(number)
            if not self._numbers[owner]:
                del self._numbers[owner]

    def segments(self, namespace: Namespace) -> Iterable[tuple[int, SuffixAutomaton]]:
        """Return the segments of a namespace with their numbers, the latest first."""
        return [(number, self._segments[namespace, number]) for number in reversed(self._numbers.get(namespace, ()))]

    def clear(self) -> None:
        """Remove all outputs."""
        self._segments.clear()
        self._numbers.clear()
        self._num_bytes = 0


class _Reader:
    """Matches of a live sequence's last tokens in the sequence itself and in each segment."""

    __slots__ = ("end", "index", "matches")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.end = 0
        self.matches: dict[int, tuple[int, int]] = {}


class SuffixDrafter:
    """Drafts from the longest match in a sequence's own tokens or in earlier outputs of its namespace.

    Args:
        shortest: minimum length of a match, in tokens.
        num_bytes: approximate memory limit of the earlier outputs, in bytes.

    Source: SuffixDecoding, arXiv 2411.04975, for the idea; suffixes are matched with an automaton here.
    """

    def __init__(self, shortest: int, num_bytes: int) -> None:
        self._shortest = shortest
        self._history = OutputHistory(num_bytes)
        self._readers: dict[int, _Reader] = {}

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        """See `Drafter`."""
        reader = self._readers.get(sequence.seq_id)
        if reader is None:
            index = NgramIndex(sequence.tokens, self._shortest, REACH)
            reader = self._readers[sequence.seq_id] = _Reader(index)
        position, best = reader.index.find()
        draft = reader.index.continuation(position, limit) if position else []
        tokens = sequence.tokens
        matches: dict[int, tuple[int, int]] = {}
        for number, segment in self._history.segments(sequence.request.namespace):
            state, length = reader.matches.get(number, (ROOT, 0))
            start = max(reader.end, len(tokens) - REACH)
            # Resume the match, or restart it REACH tokens before the end if it is too old or does not exist.
            if start > reader.end or number not in reader.matches:
                start, state, length = max(0, len(tokens) - REACH), ROOT, 0
            for token in tokens[start:]:
                state, length = segment.advance(state, length, token)
            matches[number] = state, length
            if length > max(best, self._shortest - 1):
                continuation = segment.continuation(segment.settle(state, length), limit)
                if continuation:
                    draft, best = continuation, length
        reader.matches, reader.end = matches, len(tokens)
        return draft

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Do nothing: earlier results are not used."""

    def forget(self, sequence: Sequence) -> None:
        """Release the sequence's state, and keep its output for later sequences."""
        self._readers.pop(sequence.seq_id, None)
        output = sequence.output_token_ids
        if len(output) > self._shortest:
            self._history.add(sequence.request.namespace, output)

    def reset(self) -> None:
        """See `Drafter`."""
        self._history.clear()
        for reader in self._readers.values():
            reader.matches.clear()
