"""Masks of the tokens that a request may be given: allowed tokens, suppressed end tokens, bad words; and bias."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

RowIds = tuple[int, torch.Tensor]  # a row, and token ids of int64


class BadWords:
    """Token sequences that must not come about in an output.

    Args:
        words: each of at least one token.
        device: device of the logits.
    """

    def __init__(self, words: Sequence[tuple[int, ...]], device: torch.device) -> None:
        self._device = device
        self._by_length: list[_WordsOfLength] = []
        for length in sorted({len(word) for word in words}):
            same = torch.tensor([word for word in words if len(word) == length])
            self._by_length.append(_WordsOfLength(length, same[:, :-1].to(torch.int32), same[:, -1]))

    def next_ids(self, output: torch.Tensor) -> torch.Tensor:
        """Return the tokens that would complete a word, int64 on the device.

        Args:
            output: the output's tokens so far, int32 [n], on the CPU.
        """
        found = [
            same.last_ids[(same.beginnings == output[len(output) - same.length + 1 :]).all(-1)]
            for same in self._by_length
            if same.length <= len(output) + 1
        ]
        return torch.cat(found).to(self._device) if found else torch.empty(0, dtype=torch.int64, device=self._device)


class _WordsOfLength(NamedTuple):
    """The words of `length` tokens: all tokens but the last, int32 [W, length - 1], and the last, int64 [W]."""

    length: int
    beginnings: torch.Tensor
    last_ids: torch.Tensor


def keep_only(logits: torch.Tensor, entries: Sequence[RowIds]) -> None:
    """Forbid all tokens of the named rows of logits [R, V] but those given."""
    for row, ids in entries:
        kept = logits[row, ids]
        logits[row].fill_(-torch.inf)
        logits[row, ids] = kept


def forbid(logits: torch.Tensor, entries: Sequence[RowIds]) -> None:
    """Forbid tokens of the named rows of logits [R, V]; ids that the head does not have are left out."""
    present = [(row, ids[ids < logits.shape[1]]) for row, ids in entries]
    if present:
        logits[row_entries(present, logits.device)] = -torch.inf


def add_bias(logits: torch.Tensor, entries: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
    """Add to the logits [R, V] of each row's ids, int64 [U], its bias, float32 [U]."""
    if entries:
        where = row_entries([(row, ids) for row, ids, _ in entries], logits.device)
        logits[where] += torch.cat([bias for _, _, bias in entries])


def row_entries(entries: Sequence[RowIds], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row index and the token id of every entry, both int64 [number of ids of all entries]."""
    rows = torch.tensor([row for row, _ in entries])
    sizes = torch.tensor([len(ids) for _, ids in entries])
    return torch.repeat_interleave(rows, sizes).to(device), torch.cat([ids for _, ids in entries]).to(device)
