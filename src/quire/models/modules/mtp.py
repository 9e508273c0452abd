"""The head for multi-token prediction (MTP): one more layer, which predicts the token after the next one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.models.modules.blocks import OutputRows
from quire.models.modules.decoder import Decoder
from quire.models.modules.norms import make_learned_norm
from quire.models.modules.projections import Projection
from quire.models.modules.weight_slots import WeightTable, nested
from quire.models.specs.spec import ModelSpec
from quire.ops.interface.ops import AttentionBatch, PagedKV, PagedStates, StateBatch


class MTPHead(Decoder):
    """An MTP head over paged memory.

    ```
     token x[i]              -> embedding -> norm -+
                                                   +-> input [2E -> E] -> layer -> norm -> output head -> x[i + 1]
     hidden state h[i - 1]   ----------->    norm -+                           |
                                                                               +-> in place of h[i], for x[i + 2]
    ```

    The pair of `x[i]` and `h[i - 1]` has the slot of `x[i]`, so that a block depends on no later token. The first token
    of a sequence is paired with zeros.

    Args:
        target: decoder with all its weights, whose hidden states are read; embedding and output head are shared, and
            the layer is divided among the same ranks.
        spec: specification of the head (`ModelSpec.is_mtp`), or of this rank's part.

    Source: multi-token prediction, DeepSeek-V3 technical report, arXiv 2412.19437.
    """

    def __init__(self, target: Decoder, spec: ModelSpec) -> None:
        device = target.device
        super().__init__(spec, ops=target.ops, dtype=target.dtype, device=device, ranks=target._ranks)
        self._embedding, self._target_norm, self._head = target._embedding, target._norm, target._head
        # Inputs of the layer are given for all rows: they need no look-up, and no sum of ranks.
        self._embed, self._look_up = self._look_up, self._no_rows
        self._embedding_norm, self._hidden_norm = (
            make_learned_norm(spec.norm, spec.width, target.ops, target.dtype, device) for _ in range(2)
        )
        self._input = Projection(2 * spec.width, spec.width, False, target.ops)
        slots = nested(
            embedding_norm=self._embedding_norm.slots, hidden_norm=self._hidden_norm.slots, input=self._input.slots
        )
        slots |= {name: slot for name, slot in self.weights.slots.items() if name != "embedding.weight"}
        self.weights = WeightTable(nested(mtp=slots), target.dtype, device, self._fuse)

    def _no_rows(self, input_ids: Tensor) -> Tensor:
        return torch.empty(len(input_ids), self.spec.width, dtype=self.dtype, device=self.device)

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the target [T, E] after its last norm, as the head needs them."""
        return self._target_norm(hidden)

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[PagedKV | PagedStates],
        hidden: Tensor,
        row_embeddings: tuple[Tensor, Tensor] | None = None,
        output_rows: OutputRows | None = None,
    ) -> Tensor:
        """Run the head over a step's rows; keys and values are stored.

        Args:
            input_ids, positions, groups, storages, row_embeddings, output_rows: see `Decoder`; group and storage of the
                hidden states are left out.
            hidden: [T, E], for each row the normed hidden state of the token before it.

        Returns:
            Normed hidden states, [T, E]; [R, E] with `output_rows`.
        """
        embedded = self._embed(input_ids)
        if row_embeddings is not None:
            embedded = embedded.index_copy(0, *row_embeddings)
        pairs = torch.cat([self._embedding_norm(embedded), self._hidden_norm(hidden)], -1)
        rows = torch.arange(len(pairs), device=pairs.device)
        x = self(input_ids, positions, groups, storages, (rows, self._input.run(pairs)), output_rows)
        return self._norm(x) if len(x) else x

    def predict(self, normed: Tensor) -> Tensor:
        """Return the likeliest token [R] after each normed hidden state [R, E] of the head; ranks get the same."""
        logits, ranks = self._head.run(normed), self._ranks
        if ranks is not None:
            return ranks.agreed_likeliest(logits.float(), self._widths)
        return logits.argmax(-1)
