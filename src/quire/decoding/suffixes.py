"""Drafts from what this server produced before, for the same tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from quire.decoding.automaton import ROOT, SuffixAutomaton
from quire.decoding.lookup import NgramIndex
from quire.memory.prefix.token_chain import Namespace
from quire.sequences.sequence import Sequence

# Tokens at a sequence's end in which a match is looked for.
REACH = 32
# Of all memory, what one volume may take: what is forgotten at once.
SHARE = 4
# What a token takes of a volume at most, about: two states, each with a table of its own.
MOST_BYTES_PER_TOKEN = 1000


class OutputHistory:
    """Earlier outputs, in bounded memory, apart for each namespace.

    Outputs are added to the last volume of their namespace until that is full. When all volumes together take too much,
    the one that was added to the longest ago is forgotten, whoever's it is.

    Args:
        num_bytes: of all volumes, about.
    """

    def __init__(self, num_bytes: int) -> None:
        self._limit_bytes = num_bytes
        self._most_tokens = max(1, num_bytes // (SHARE * MOST_BYTES_PER_TOKEN))
        # By namespace and number, the one added to last at the end; and of each namespace the numbers there are.
        self._volumes: OrderedDict[tuple[Namespace, int], SuffixAutomaton] = OrderedDict()
        self._numbers: dict[Namespace, list[int]] = {}
        self._num_made = 0
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all volumes, about."""
        return self._num_bytes

    def add(self, namespace: Namespace, tokens: Seq[int]) -> None:
        """Add an output; of one that would fill a volume by itself, the end."""
        tokens = tokens[-self._most_tokens :]
        numbers = self._numbers.setdefault(namespace, [])
        key = namespace, numbers[-1] if numbers else -1
        if not numbers or self._volumes[key].num_bytes * SHARE > self._limit_bytes:
            key = namespace, self._num_made
            self._num_made += 1
            numbers.append(key[1])
            self._volumes[key] = SuffixAutomaton()
            self._num_bytes += self._volumes[key].num_bytes
        volume = self._volumes[key]
        before = volume.num_bytes
        volume.add(tokens)
        self._num_bytes += volume.num_bytes - before
        self._volumes.move_to_end(key)
        while self._num_bytes > self._limit_bytes:
            (owner, number), oldest = self._volumes.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
            self._numbers[owner].remove(number)
            if not self._numbers[owner]:
                del self._numbers[owner]

    def segments(self, namespace: Namespace) -> Iterable[tuple[int, SuffixAutomaton]]:
        """Return the volumes of a namespace, each with a number of its own, the latest first."""
        return [(number, self._volumes[namespace, number]) for number in reversed(self._numbers.get(namespace, ()))]

    def clear(self) -> None:
        """Forget everything."""
        self._volumes.clear()
        self._numbers.clear()
        self._num_bytes = 0


class _Reader:
    """Where a live sequence's end was met before: in itself, and in each volume."""

    __slots__ = ("end", "index", "matches")

    def __init__(self, index: NgramIndex) -> None:
        self.index = index
        self.end = 0
        self.matches: dict[int, tuple[int, int]] = {}


class SuffixDrafter:
    """Drafts from a sequence's own tokens or earlier outputs of its namespace, wherever more of its end was met.

    Args:
        shortest: tokens at its end that must have been met.
        num_bytes: of what is kept of earlier outputs.

    Source: SuffixDecoding, arXiv 2411.04975, for the idea; suffixes are matched with an automaton here.
    """

    def __init__(self, shortest: int, num_bytes: int) -> None:
        self._shortest = shortest
        self._archive = OutputHistory(num_bytes)
        self._readers: dict[int, _Reader] = {}

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        """See `Drafter`."""
        reader = self._readers.get(sequence.seq_id)
        if reader is None:
            index = NgramIndex(sequence.tokens, self._shortest, REACH)
            reader = self._readers[sequence.seq_id] = _Reader(index)
        place, best = reader.index.find()
        draft = reader.index.continuation(place, limit) if place else []
        tokens = sequence.tokens
        matches: dict[int, tuple[int, int]] = {}
        for number, volume in self._archive.segments(sequence.request.namespace):
            state, length = reader.matches.get(number, (ROOT, 0))
            start = max(reader.end, len(tokens) - REACH)
            # What it missed, or all that matters where it missed more than that, or never read the volume.
            if start > reader.end or number not in reader.matches:
                start, state, length = max(0, len(tokens) - REACH), ROOT, 0
            for token in tokens[start:]:
                state, length = volume.advance(state, length, token)
            matches[number] = state, length
            if length > max(best, self._shortest - 1):
                found = volume.continuation(volume.settle(state, length), limit)
                if found:
                    draft, best = found, length
        reader.matches, reader.end = matches, len(tokens)
        return draft

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """See `Drafter`: nothing is learnt."""

    def forget(self, sequence: Sequence) -> None:
        """See `Drafter`: the output is kept for later ones."""
        self._readers.pop(sequence.seq_id, None)
        output = sequence.output_token_ids
        if len(output) > self._shortest:
            self._archive.add(sequence.request.namespace, output)

    def reset(self) -> None:
        """See `Drafter`."""
        self._archive.clear()
        for reader in self._readers.values():
            reader.matches.clear()
