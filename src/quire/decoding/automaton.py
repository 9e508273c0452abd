"""A suffix automaton: all that some texts say, such that the longest match of a text's end is found as it grows."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

# What a state takes, and, where several tokens may follow, its table and an entry of that.
STATE_BYTES = 24
TABLE_BYTES = 352
ENTRY_BYTES = 112
TOKEN_BYTES = 4
# Stands in the text where one text ends, and is no token.
END = -1
ROOT = 0


class SuffixAutomaton:
    """The smallest automaton that reads every part of some texts.

    A state stands for the parts that end at the same places. Adding a token takes constant time on average; there are
    at most two states and three transitions for each token. Nothing can be taken out.

    Source: Blumer et al., 1985; for several texts, Mohri et al., 2009.
    """

    __slots__ = ("_ends", "_lengths", "_links", "_nexts", "_num_entries", "_tables", "_text", "_tokens")

    def __init__(self) -> None:
        self._text = array("i")
        # By state: tokens of its longest part, the state of its longest suffix that ends elsewhere too, the place
        # behind the part in the text, and the one token that may follow, with the state behind it.
        self._lengths = array("i", [0])
        self._links = array("i", [-1])
        self._ends = array("i", [0])
        self._tokens = array("i", [END])
        self._nexts = array("i", [0])
        # Of states that several tokens may follow: all of them.
        self._tables: dict[int, dict[int, int]] = {}
        self._num_entries = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return len(self._text)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory, about."""
        tables = len(self._tables) * TABLE_BYTES + self._num_entries * ENTRY_BYTES
        return len(self._lengths) * STATE_BYTES + len(self._text) * TOKEN_BYTES + tables

    def add(self, tokens: Sequence[int]) -> None:
        """Add a text."""
        state = ROOT
        for token in tokens:
            self._text.append(token)
            state = self._extend(state, token)
            # Of the places where a part ends, the latest tells best how it goes on; so for the longest two.
            self._ends[state] = self._ends[self._links[state]] = len(self._text)
        self._text.append(END)

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Return the state of the longest match of a text, and its length, after one more token of the text.

        Args:
            state: of the longest match so far, `ROOT` at first; texts may have been added since.
            length: of that match.
            token: the text's next.
        """
        state = self.settle(state, length)
        following = self._step(state, token)
        while following < 0 and state != ROOT:
            state = self._links[state]
            length = self._lengths[state]
            following = self._step(state, token)
        return (ROOT, 0) if following < 0 else (self.settle(following, length + 1), length + 1)

    def settle(self, state: int, length: int) -> int:
        """Return the state that a match of `length` tokens is in, where texts that were added have split its state."""
        while state != ROOT and length <= self._lengths[self._links[state]]:
            state = self._links[state]
        return state

    def continuation(self, state: int, limit: int) -> list[int]:
        """Return how a text went on behind a match: `limit` tokens, or fewer where it ended."""
        end = self._ends[state]
        draft = self._text[end : end + limit].tolist()
        return draft[: draft.index(END)] if END in draft else draft

    def _step(self, state: int, token: int) -> int:
        """Return the state behind a token, or -1."""
        if self._tokens[state] == token:
            return self._nexts[state]
        table = self._tables.get(state)
        return -1 if table is None else table.get(token, -1)

    def _set(self, state: int, token: int, following: int) -> None:
        table = self._tables.get(state)
        if table is not None:
            self._num_entries += token not in table
            table[token] = following
        elif self._tokens[state] in (END, token):
            self._tokens[state], self._nexts[state] = token, following
        else:
            self._tables[state] = {self._tokens[state]: self._nexts[state], token: following}
            self._num_entries += 2
            self._tokens[state] = END

    def _extend(self, last: int, token: int) -> int:
        """Return the state of the text read so far and a token, which is made where it is missing."""
        known = self._step(last, token)
        if known >= 0:
            return known if self._lengths[known] == self._lengths[last] + 1 else self._split(last, token, known)
        new = self._new_state(self._lengths[last] + 1, len(self._text))
        state = last
        while state >= 0 and (known := self._step(state, token)) < 0:
            self._set(state, token, new)
            state = self._links[state]
        if state < 0:
            self._links[new] = ROOT
        elif self._lengths[known] == self._lengths[state] + 1:
            self._links[new] = known
        else:
            self._links[new] = self._split(state, token, known)
        return new

    def _split(self, state: int, token: int, known: int) -> int:
        """Give the shorter parts of a state, up to those reached from `state` with `token`, a state of their own."""
        new = self._new_state(self._lengths[state] + 1, self._ends[known])
        self._links[new] = self._links[known]
        self._tokens[new], self._nexts[new] = self._tokens[known], self._nexts[known]
        table = self._tables.get(known)
        if table is not None:
            self._tables[new] = table.copy()
            self._num_entries += len(table)
        self._links[known] = new
        while state >= 0 and self._step(state, token) == known:
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
