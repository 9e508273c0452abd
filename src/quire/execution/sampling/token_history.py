"""The tokens that a sequence has used, with counts that are updated incrementally."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch


class TokenCounts(NamedTuple):
    """Distinct tokens of a sequence (U of them) and their numbers of occurrences.

    Args:
        ids: token ids, int64 [U].
        seen: occurrences in prompt and output, int32 [U]; 0 after a roll back.
        output: occurrences in the output alone, int32 [U].
    """

    ids: torch.Tensor
    seen: torch.Tensor
    output: torch.Tensor


class TokenHistory:
    """A sequence's tokens, and their counts, which are updated incrementally when they are read.

    ```
     tokens   |<-- counted -->|<-- not yet -->|
    ```
    """

    def __init__(self, token_ids: Sequence[int], num_prompt: int) -> None:
        self._token_ids = array("i", token_ids)
        self._num_prompt = num_prompt
        known = torch.tensor(token_ids, dtype=torch.int64)
        ids, inverse = torch.unique(known, return_inverse=True)
        self._counts = TokenCounts(
            ids,
            torch.bincount(inverse, minlength=len(ids)).to(torch.int32),
            torch.bincount(inverse[num_prompt:], minlength=len(ids)).to(torch.int32),
        )
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}
        self._num_counted = len(self._token_ids)

    def sync(self, start: int, token_ids: Sequence[int], *, is_end: bool) -> None:
        """Set the tokens at `[start, start + len)`; drop later ones, as rolled back, if a token changes or `is_end`."""
        known = self._token_ids
        assert start <= len(known), f"tokens [{len(known)}, {start}) were never named"
        end = start + len(token_ids)
        same = start
        while same < min(end, len(known)) and known[same] == token_ids[same - start]:
            same += 1
        if same < end or is_end:
            for position in range(self._num_counted - 1, same - 1, -1):
                self._count(known[position], position, -1)
            self._num_counted = min(self._num_counted, same)
            del known[same:]
            known.extend(islice(token_ids, same - start, None))

    def add_drawn(self, position: int, token_id: int) -> None:
        """Add a token that was drawn for a position, before a step names it.

        Nothing is added if the tokens before it are not known: a draw has failed, and with it the sequence.
        """
        if position == len(self._token_ids):
            self._token_ids.append(token_id)

    def tokens(self) -> torch.Tensor:
        """Return prompt and output, int32 [n], as a view that is valid until tokens are added."""
        return torch.frombuffer(self._token_ids, dtype=torch.int32)

    def prompt_and_output(self) -> tuple[list[int], list[int]]:
        """Return the tokens as two lists."""
        return self._token_ids[: self._num_prompt].tolist(), self._token_ids[self._num_prompt :].tolist()

    def counts(self) -> TokenCounts:
        """Return the counts as views; they change with the next call."""
        for position in range(self._num_counted, len(self._token_ids)):
            self._count(self._token_ids[position], position, 1)
        self._num_counted = len(self._token_ids)
        size = len(self._slots)
        return TokenCounts(*(column[:size] for column in self._counts))

    def _count(self, token_id: int, position: int, change: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._counts.ids):
            # Doubling keeps the cost of a new token constant on average.
            self._counts = TokenCounts(*(torch.cat((column, column.new_zeros(slot + 16))) for column in self._counts))
        self._counts.ids[slot] = token_id
        self._counts.seen[slot] += change
        if position >= self._num_prompt:
            self._counts.output[slot] += change
