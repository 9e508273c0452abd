"""A suffix automaton over several texts, which finds the longest match of a growing text's suffix."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# Estimated memory of a state, of a transition table, and of an entry of that table.
STATE_BYTES = 24
TABLE_BYTES = 352
ENTRY_BYTES = 112
TOKEN_BYTES = 4
# Marks the end of each text in the stored tokens; no token has this id.
END = -1
ROOT = 0


class SuffixAutomaton:
    """The smallest automaton that accepts every substring of the added texts.

    A state stands for the substrings that end at the same positions. Adding a token takes constant time on average;
    there are at most two states and three transitions for each token. Texts cannot be removed.

    Source: Blumer et al., 1985; for several texts, Mohri et al., 2009.
    """

    __slots__ = ("_ends", "_lengths", "_links", "_nexts", "_num_entries", "_tables", "_text", "_tokens")

    def __init__(self) -> None:
        self._text = array("i")
        # Indexed by state: the length of its longest substring, its suffix link, the position after an occurrence of
        # the substring, and its only transition as a token and the next state.
        self._lengths = array("i", [0])
        self._links = array("i", [-1])
        self._ends = array("i", [0])
        self._tokens = array("i", [END])
        self._nexts = array("i", [0])
        # Transitions of the states that have more than one.
        self._tables: dict[int, dict[int, int]] = {}
        self._num_entries = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts, end marks included."""
        return len(self._text)

    @property
    def num_bytes(self) -> int:
        """Estimated memory in bytes."""
        tables = len(self._tables) * TABLE_BYTES + self._num_entries * ENTRY_BYTES
        return len(self._lengths) * STATE_BYTES + len(self._text) * TOKEN_BYTES + tables

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text."""
        state = ROOT
        for token in tokens:
            self._text.append(token)
            state = self._extend(state, token)
            # The latest occurrence predicts the continuation best. It is recorded for the two longest suffixes.
            self._ends[state] = self._ends[self._links[state]] = len(self._text)
        self._text.append(END)

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return state and length of the longest match of a text's suffix after one more token of that text."""
        state = self.settle(state, length)
        next_state = self._step(state, token)
        while next_state < 0 and state != ROOT:
            state = self._links[state]
            length = self._lengths[state]
            next_state = self._step(state, token)
        return (ROOT, 0) if next_state < 0 else (self.settle(next_state, length + 1), length + 1)

    def settle(self, state: int, length: int) -> int:
        """Return the current state of a match of `length` tokens, because added texts may have split its state."""
        while state != ROOT and length <= self._lengths[self._links[state]]:
            state = self._links[state]
        return state

    def continuation(self, state: int, limit: int) -> list[int]:
        """Return at most `limit` tokens that followed the match in a text, up to the end of the text."""
        end = self._ends[state]
        draft = self._text[end : end + limit].tolist()
        return draft[: draft.index(END)] if END in draft else draft

    def _step(self, state: int, token: int) -> int:
        """Return the next state after a token, or -1."""
        if self._tokens[state] == token:
            return self._nexts[state]
        table = self._tables.get(state)
        return -1 if table is None else table.get(token, -1)

    def _set(self, state: int, token: int, next_state: int) -> None:
        table = self._tables.get(state)
        if table is not None:
            self._num_entries += token not in table
            table[token] = next_state
        elif self._tokens[state] in (END, token):
            self._tokens[state], self._nexts[state] = token, next_state
        else:
            self._tables[state] = {self._tokens[state]: self._nexts[state], token: next_state}
            self._num_entries += 2
            self._tokens[state] = END

    def _extend(self, last: int, token: int) -> int:
        """Return the state of the text after a token; create the state if it does not exist."""
        target = self._step(last, token)
        if target >= 0:
            return target if self._lengths[target] == self._lengths[last] + 1 else self._split(last, token, target)
        new = self._new_state(self._lengths[last] + 1, len(self._text))
        state = last
        while state >= 0 and (target := self._step(state, token)) < 0:
            self._set(state, token, new)
            state = self._links[state]
        if state < 0:
            self._links[new] = ROOT
        elif self._lengths[target] == self._lengths[state] + 1:
            self._links[new] = target
        else:
            self._links[new] = self._split(state, token, target)
        return new

    def _split(self, state: int, token: int, target: int) -> int:
        """Move a state's substrings that are reached from `state` with `token`, and shorter ones, to a new state."""
        new = self._new_state(self._lengths[state] + 1, self._ends[target])
        self._links[new] = self._links[target]
        self._tokens[new], self._nexts[new] = self._tokens[target], self._nexts[target]
        table = self._tables.get(target)
        if table is not None:
            self._tables[new] = table.copy()
            self._num_entries += len(table)
        self._links[target] = new
        while state >= 0 and self._step(state, token) == target:
            self._set(state, token, new)
            state = self._links[state]
        return new

    def _new_state(self, length: int, end: int) -> int:
        self._lengths.append(length)
        self._links.append(ROOT)
        self._ends.append(end)
        self._tokens.append(END)
        self._nexts.append(0)
        return len(self._lengths) - 1
