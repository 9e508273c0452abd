"""The interface of a causal language model over paged memory, which the data plane runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.models.modules.blocks import OutputRows
from quire.models.modules.pooled_heads import PooledHeads
from quire.models.modules.weight_slots import WeightTable
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.spec import LayerGroup, ModelSpec
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.ops import AttentionBatch, Ops, PagedKV, PagedStates, StateBatch


class CausalModel(Protocol):
    """A decoder whose steps are ragged rows over paged memory; see `quire.models.modules.decoder.Decoder`.

    Its two implementations are that decoder, for the families, and
    `quire.models.hosted.decoder.HostedDecoder`, for modules of transformers.

    Attributes:
        replicas: ranks that each hold a full copy of this draft model; None otherwise.
        heads: layers over pooled hidden states.
        merged_adapter: digest of the adapter that is merged into the weights; None for none.
    """

    replicas: RankGroup | None
    heads: PooledHeads
    merged_adapter: str | None

    @property
    def spec(self) -> ModelSpec | HostedSpec: ...
    @property
    def ops(self) -> Ops: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def weights(self) -> WeightTable: ...
    @property
    def step_adapters(self) -> StepAdapters: ...
    @property
    def ranks(self) -> RankGroup | None: ...
    @property
    def is_follower(self) -> bool: ...
    @property
    def kernels(self) -> str: ...
    @property
    def cache_groups(self) -> tuple[LayerGroup, ...]: ...

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[PagedKV | PagedStates],
        row_embeddings: tuple[Tensor, Tensor] | None = None,
        output_rows: OutputRows | None = None,
        adapters: tuple[LoraRows, LoraRows | None] | None = None,
    ) -> Tensor:
        """Run the layers over a step's rows; return hidden states [T, E], or [R, E] with `output_rows`."""

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states [R, E] after the last norm."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V], float32, of hidden states [R, E]."""

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the greatest logit and its token of each row, if ranks share the head; else None."""

    def draft_tokens(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token [R] after each row of `hidden` [R, E]."""

    def fuse_adapted(self) -> None:
        """Prepare for steps with adapters, once all layers take them."""

    def serve_head(self) -> None:
        """Compute this rank's logits of rows that rank 0 sends, until it sends commands."""
