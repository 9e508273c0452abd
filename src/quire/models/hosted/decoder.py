"""A decoder whose layers are transformers' modules, over paged memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quire.distributed.rank_group import RankGroup
from quire.models.hosted.body import HostedHead, run_body
from quire.models.hosted.choice import one_process_only
from quire.models.hosted.interface import hosted_by
from quire.models.hosted.step import HostedCall, HostedStep, use_backend_heads
from quire.models.modules.blocks import OutputRows
from quire.models.modules.pooled_heads import PooledHeads
from quire.models.modules.weight_slots import WeightTable
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.spec import LayerGroup
from quire.ops.interface.adapted_linear import StepAdapters
from quire.ops.interface.lora import LoraRows
from quire.ops.interface.ops import AttentionBatch, Ops, PagedKV, PagedStates, Rotation, StateBatch


class HostedDecoder:
    """A decoder of transformers' modules over paged memory, with the interface of `CausalModel`.

    A step's rows are one packed sequence [1, T] with explicit positions. Attention reads and writes the pages; all else
    is the modules' own. Call it under `torch.inference_mode()`.

    Args:
        spec: description from the trial step.
        module: the model with its weights.
        weights: table of the module's weights.
        ops: kernels.
        dtype: dtype of weights, hidden states and cache.
        device: device of the weights.
    """

    ranks: RankGroup | None = None
    is_follower = False

    def __init__(
        self,
        spec: HostedSpec,
        module: nn.Module,
        weights: WeightTable,
        *,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.spec, self.ops, self.dtype, self.device, self.weights = spec, ops, dtype, device, weights
        self.module = module
        self.step_adapters = StepAdapters()
        self.merged_adapter: str | None = None
        self.replicas: RankGroup | None = None
        self.heads = PooledHeads(None, (), spec.width, ops, dtype, device)
        self._body, self._head = module.get_submodule(spec.body), HostedHead(module, spec.body)
        self._calls = [
            HostedCall(module.get_submodule(call.module), call, position)
            for call, position in zip(spec.attention, spec.cache_positions, strict=True)
        ]
        use_backend_heads(self._calls, dtype)
        self._widths = {call.head_dim for call in self._calls}
        self._unrotated: dict[int, Rotation] = {}
        self._row_embeddings: tuple[Tensor, Tensor] | None = None
        causal_model: Any = module
        causal_model.get_input_embeddings().register_forward_hook(self._put_embeddings)

    @property
    def cache_groups(self) -> tuple[LayerGroup, ...]:
        """Layer groups, in the order of storages and attention batches."""
        return self.spec.cache_groups

    @property
    def kernels(self) -> str:
        """Name of the kernels and of what calls them: both round, so their keys and values are their own."""
        return f"{self.ops.name}, with modules of {self.spec.library}"

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
        """Run the layers over a step's rows; keys and values are stored.

        Args:
            input_ids: [T] of int64.
            positions: [T] of int64.
            groups: the step's part in each cache group.
            storages: one for each cache group.
            row_embeddings: rows, [M] of int64, and embeddings [M, E] that replace what the embedding module returns for
                their tokens.
            output_rows: rows whose hidden states are returned; None for all rows.
            adapters: rows that have an adapter, among all rows and among the output rows; None for no such row.

        Returns:
            Hidden states as the head takes them, [T, E]; [R, E] with `output_rows`.
        """
        if adapters is not None or self.step_adapters.all is not None:
            self.step_adapters.begin(adapters)
        attention = []
        for batch, storage in zip(groups, storages, strict=True):
            assert isinstance(batch, AttentionBatch), "modules with a state are refused"
            attention.append(self.ops.step_attention(batch, storage))  # type: ignore[arg-type]
        rotations = {width: self._rotation(len(input_ids), width) for width in self._widths}
        step = HostedStep(self._calls, attention, rotations, self.dtype)
        self._row_embeddings = row_embeddings
        with hosted_by(step):
            hidden: Tensor = run_body(self._body, input_ids, positions)[0][0]
        self._row_embeddings = None  # the head may look up tokens, too
        if step.num_calls != len(self._calls):
            raise RuntimeError(f"{step.num_calls} calls of attention in a step, {len(self._calls)} in the trial step")
        return hidden if output_rows is None else hidden.index_select(0, output_rows.rows)

    def _put_embeddings(self, _: nn.Module, __: Any, embeddings: Tensor) -> Tensor | None:
        """Replace rows of embeddings [1, T, E] that a prompt gives; None for none."""
        if self._row_embeddings is None:
            return None
        rows, given = self._row_embeddings
        return embeddings.index_copy(1, rows, given[None].to(embeddings.dtype))

    def _rotation(self, num_rows: int, head_dim: int) -> Rotation:
        """Return a rotation of rows by zero."""
        made = self._unrotated.get(head_dim)
        if made is None or len(made.cos) < num_rows:
            shape = num_rows, 1, head_dim
            ones = torch.ones(shape, dtype=self.dtype, device=self.device)
            self._unrotated[head_dim] = made = Rotation(ones, torch.zeros_like(ones))
        return Rotation(made.cos[:num_rows], made.sin[:num_rows])

    def normed(self, hidden: Tensor) -> Tensor:
        """Return hidden states [R, E] after the last norm, which the layers have applied."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V], float32, of hidden states [R, E]."""
        return self._head(hidden).float()

    def likeliest(self, hidden: Tensor) -> tuple[Tensor, Tensor] | None:  # noqa: ARG002
        """Return None: one process has all logits."""
        return None

    def draft_tokens(self, hidden: Tensor) -> Tensor:
        """Return the likeliest token [R] after each row of `hidden` [R, E]."""
        return self.logits(hidden).argmax(-1)

    def fuse_adapted(self) -> None:
        """Do nothing: the modules run layer by layer, with adapters and without."""

    def serve_head(self) -> None:
        """Refuse: only ranks that share a model serve its head."""
        raise one_process_only()
