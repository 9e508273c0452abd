"""Token counts of sequences on the device, for penalties without synchronisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.execution.sampling.token_history import TokenHistory
from quire.execution.step.pinned import placed
from quire.scheduling.plan import ScheduledSequence
from quire.sequences.decoding.drafting import UNKNOWN

# Replaces placeholders in int64 [n], one for each item, by the tokens that they stand for.
PutDrawn = Callable[[Tensor, Sequence[ScheduledSequence]], None]


class CountedRow(NamedTuple):
    """A row whose sequence's tokens are counted.

    Args:
        item: its item.
        history: tokens that the host knows: all up to the item's own, except a placeholder.
        num_prompt: length of the prompt.
    """

    item: ScheduledSequence
    history: TokenHistory
    num_prompt: int


class RowPenalties(NamedTuple):
    """The penalties of rows; see `SamplingParams`.

    Args:
        rows: int64 [n], rows of the logits.
        slots: int64 [n], table rows of their sequences in `DeviceCounts`.
        repetition, frequency, presence: float32 [n].
    """

    rows: Tensor
    slots: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class DeviceCounts:
    """Token counts, one table row per sequence.

    A step adds the token that it computes for a sequence, on the device if the host has not read it. The host keeps the
    number of counted tokens; if a step does not continue from there, the tokens are counted again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Whether each token is in the prompt, and its count in the output; [slots, V].
        self._in_prompt = torch.empty(0, 0, dtype=torch.bool, device=device)
        self._output = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._slots: dict[int, int] = {}
        self._lengths: dict[int, int] = {}
        self._free: list[int] = []

    def close(self, seq_id: int) -> None:
        """Forget a sequence."""
        slot = self._slots.pop(seq_id, None)
        self._lengths.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot)

    def sync(self, rows: Sequence[CountedRow], vocab_size: int, put_drawn: PutDrawn) -> Tensor:
        """Bring the counts of sequences up to date; a second call in a step changes nothing.

        Returns:
            Their slots, int64 [n].
        """
        added: list[tuple[int, int, int]] = []
        for (seq_id, start, token_ids, *_), history, num_prompt in rows:
            slot, token_id = self._slots.get(seq_id), token_ids[0]
            goes_on = len(token_ids) == 1 and start >= num_prompt and self._lengths.get(seq_id) == start
            if slot is None or not goes_on:
                slot = self._take(seq_id, vocab_size)
                self._fill(slot, history)
            self._lengths[seq_id] = start + len(token_ids)
            # A history has all tokens but a placeholder's.
            added.append((slot, token_id, 1) if goes_on or token_id == UNKNOWN else (slot, 0, 0))
        slots, tokens, counts = self._placed(added).unbind(1)
        put_drawn(tokens, [row.item for row in rows])
        self._output.index_put_((slots, tokens), counts.int(), accumulate=True)
        return slots

    def penalize(self, logits: Tensor, penalties: RowPenalties) -> None:
        """Change logits, float32 [R, V], as `penalties.penalize_tokens` does."""
        values, output = logits[penalties.rows], self._output[penalties.slots]
        repetition = penalties.repetition[:, None]
        is_used = output > 0
        scaled = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(is_used | self._in_prompt[penalties.slots], scaled, values)
        values -= penalties.frequency[:, None] * output
        values -= penalties.presence[:, None] * is_used
        logits[penalties.rows] = values

    def _take(self, seq_id: int, vocab_size: int) -> int:
        """Return the slot of a sequence; a new one if it has none."""
        slot = self._slots.get(seq_id)
        if slot is not None:
            return slot
        if not self._free:
            count = len(self._output)
            shape = max(2 * count, 8), vocab_size
            in_prompt, output = self._in_prompt.new_zeros(shape), self._output.new_zeros(shape)
            if count:
                in_prompt[:count], output[:count] = self._in_prompt, self._output
            self._in_prompt, self._output = in_prompt, output
            self._free = list(range(shape[0] - 1, count - 1, -1))
        slot = self._slots[seq_id] = self._free.pop()
        return slot

    def _fill(self, slot: int, history: TokenHistory) -> None:
        """Count all tokens of a sequence again."""
        known, seen, known_output = history.counts()
        ids, output, is_prompt = placed(torch.stack((known, known_output, seen > known_output)), self._device)
        self._output[slot] = 0
        self._output[slot, ids] = output.int()
        self._in_prompt[slot] = False
        self._in_prompt[slot, ids] = is_prompt.bool()

    def _placed(self, values: Sequence[tuple[int, int, int]]) -> Tensor:
        return placed(torch.tensor(values, dtype=torch.int64), self._device)
