"""The computation of captured steps: a step of a model, or a draft pass of a draft model or an MTP head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from quire.execution.step.kv_storage import Storage
from quire.models.modules.decoder import Decoder
from quire.models.modules.mtp import MTPHead
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.ops import AttentionBatch, StateBatch


class StepInputs(NamedTuple):
    """Inputs of a captured step of n rows: views of static memory.

    Args:
        ids, positions: int64 [n].
        batches: part of the step in each cache group.
        adapters: rows with adapters; None for none.
    """

    ids: Tensor
    positions: Tensor
    batches: Sequence[AttentionBatch | StateBatch]
    adapters: tuple[LoraRows, None] | None


class CapturedPass(Protocol):
    """Runs a model in captured steps."""

    def make_outputs(self, num_rows: int) -> Tensor:
        """Return static memory for the outputs of the largest step; see `ReplayedStep`."""

    def run(self, inputs: StepInputs, hidden: Tensor, outputs: Tensor) -> None:
        """Run the model over all rows of a step, and copy its results to `hidden`, [n, E], and `outputs`, [n, ...]."""


class StepPass:
    """A step of a model; its outputs are logits."""

    def __init__(self, decoder: Decoder, storages: Sequence[Storage]) -> None:
        self._decoder, self._storages = decoder, storages

    def make_outputs(self, num_rows: int) -> Tensor:
        # Ranks have slices of the logits, which are computed and gathered after the replay.
        num_logits = 0 if self._decoder.ranks else self._decoder.spec.vocab_size
        return torch.zeros(num_rows, num_logits, device=self._decoder.device)

    def run(self, inputs: StepInputs, hidden: Tensor, outputs: Tensor) -> None:
        ids, positions, batches, adapters = inputs
        found = self._decoder(ids, positions, batches, self._storages, adapters=adapters)
        hidden.copy_(found)
        if self._decoder.ranks is None:
            outputs.copy_(self._decoder.logits(found))


class DraftPass:
    """A pass of a draft model; its outputs are the likeliest next tokens, and its hidden states are not read."""

    def __init__(self, decoder: Decoder, storages: Sequence[Storage]) -> None:
        self._decoder, self._storages = decoder, storages

    def make_outputs(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, dtype=torch.int64, device=self._decoder.device)

    def run(self, inputs: StepInputs, hidden: Tensor, outputs: Tensor) -> None:  # noqa: ARG002
        ids, positions, batches, adapters = inputs
        found = self._decoder(ids, positions, batches, self._storages, adapters=adapters)
        outputs.copy_(self._decoder.draft_tokens(found))


class MTPPass:
    """A pass of an MTP head, which replaces the hidden states that it reads; its outputs are the likeliest next tokens.

    ```
     static memory   token ids, positions, block tables ->            -> the likeliest tokens
                     hidden states, one for each row    -> captured   -> hidden states of the head, in their place
    ```

    Nothing is copied between passes as long as the same sequences want drafts. Padding rows read stale hidden states,
    which affect no other row.
    """

    def __init__(self, head: MTPHead, storages: Sequence[Storage]) -> None:
        self._head, self._storages = head, storages

    def make_outputs(self, num_rows: int) -> Tensor:
        return torch.zeros(num_rows, dtype=torch.int64, device=self._head.device)

    def run(self, inputs: StepInputs, hidden: Tensor, outputs: Tensor) -> None:
        found = self._head.run(inputs.ids, inputs.positions, inputs.batches, self._storages, hidden)
        hidden.copy_(found)
        outputs.copy_(self._head.predict(found))
