"""Masks of the tokens that a request may get: allowed tokens, suppressed end tokens, bad words; and bias."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import torch

RowIds = tuple[int, torch.Tensor]  # a row, and token ids of int64


# Maximum number of requests whose words are cached: all samples and prompts of a request have the same words.
NUM_KEPT = 8
LAST: Final = None  # in a node, beside tokens

_Node = dict[int | None, Any]


class BadWords:
    """Token sequences that must not occur in an output.

    All tokens of a word but the last are in a tree, in reverse order, so a lookup from the end of an output stops at
    the first token that no word has there.
    """

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._longest = max(map(len, words)) - 1
        # A node has the nodes of earlier tokens, and with `LAST` the last tokens of the words that begin with it.
        self._root: _Node = {}
        for *beginning, last in words:
            node = self._root
            for token_id in reversed(beginning):
                node = node.setdefault(token_id, {})
            node.setdefault(LAST, []).append(last)
        self._single_ids = torch.tensor(self._root.pop(LAST, ()), dtype=torch.int64)

    def next_ids(self, output: torch.Tensor) -> torch.Tensor:
        """Return the tokens that would complete a word, int64 [n] on the CPU.

        Args:
            output: the output's tokens so far, int32 [n], on the CPU.
        """
        found: list[int] = []
        node = self._root
        for token_id in reversed(output[max(0, len(output) - self._longest) :].tolist()):
            if token_id not in node:
                break
            node = node[token_id]
            found += node.get(LAST, ())
        return torch.cat([self._single_ids, torch.tensor(found, dtype=torch.int64)]) if found else self._single_ids


@lru_cache(NUM_KEPT)
def bad_words_of(words: tuple[tuple[int, ...], ...]) -> BadWords:
    """Return the tree of some words."""
    return BadWords(words)


def keep_only(logits: torch.Tensor, entries: Sequence[RowIds]) -> None:
    """Forbid all tokens of the named rows of logits [R, V] except the listed ones."""
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
