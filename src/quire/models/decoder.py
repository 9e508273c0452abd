"""One decoder for all families: it runs what a `ModelSpec` says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.blocks import AttentionBlock, GatedMLPBlock, Norm, Projection, WeightSlot, WeightSlots, nested
from quire.models.rope import RotaryEmbedding
from quire.models.spec import CacheGroup, ModelSpec
from quire.ops.interface import AttentionBatch, Ops, PagedKV


class Decoder:
    """A decoder-only language model over paged memory.

    It holds no state of a step: all that a step needs is an argument. Call it under `torch.inference_mode()`.

    Args:
        spec: what to compute.
        ops: with which kernels.
        dtype: of weights, hidden states and cache.
    """

    def __init__(self, spec: ModelSpec, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self._ops = ops
        self.dtype = dtype
        self._device = device
        self._embedding = torch.empty(0)
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        self._head = Projection(spec.width, spec.vocab_size, False, ops)
        new_norm = partial(Norm, width=spec.width, ops=ops, dtype=dtype, device=device)
        self._norm = new_norm(spec.norm)
        kinds = list(dict.fromkeys((layer.mixer.rope, layer.mixer.head_dim) for layer in spec.layers))
        self._rotations = [RotaryEmbedding(rope, head_dim, dtype, device) for rope, head_dim in kinds]
        slots = {"embedding.weight": WeightSlot((spec.vocab_size, spec.width), self._fill_embedding)}
        self._layers = []
        for idx, (layer, (group_idx, place)) in enumerate(zip(spec.layers, spec.cache_places, strict=True)):
            mixer_norm, ffn_norm = new_norm(layer.norm), new_norm(layer.norm)
            post_norms = [None if layer.post_norm is None else new_norm(layer.post_norm) for _ in range(2)]
            mixer = AttentionBlock(layer.mixer, spec.width, place, post_norms[0], ops, dtype, device)
            ffn = GatedMLPBlock(layer.ffn, spec.width, post_norms[1], ops)
            parts = nested(mixer_norm=mixer_norm.slots, mixer=mixer.slots, ffn_norm=ffn_norm.slots, ffn=ffn.slots)
            slots |= nested(**{f"layers.{idx}": parts})
            rotation_idx = kinds.index((layer.mixer.rope, layer.mixer.head_dim))
            self._layers.append((mixer_norm, mixer, ffn_norm, ffn, rotation_idx, group_idx))
        slots |= nested(norm=self._norm.slots)
        if not spec.tied_head:
            slots |= nested(head=self._head.slots)
        self._slots: WeightSlots = slots
        self._missing = dict.fromkeys(slots)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """What the engine sizes memory by; storages and attention batches come in this order."""
        return self.spec.cache_groups

    @property
    def kernels(self) -> str:
        """What computes, for people."""
        return self._ops.name

    @property
    def missing_weights(self) -> tuple[str, ...]:
        """Names of the weights that were not loaded yet; the decoder runs when there is none."""
        return tuple(self._missing)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight, in the order in which a checkpoint usually stores them."""
        return {name: slot.shape for name, slot in self._slots.items()}

    def load_weight(self, name: str, tensor: Tensor) -> None:
        """Take over one weight; the caller lets go of it.

        Args:
            name: one of `weight_shapes()`.
            tensor: of that shape and of the decoder's dtype.

        Raises:
            CheckpointError: another name, shape or dtype, or a weight that was loaded before.
        """
        slot = self._slots.get(name)
        if slot is None:
            raise CheckpointError(f"the model has no weight {name!r}")
        if tuple(tensor.shape) != slot.shape or tensor.dtype != self.dtype:
            raise CheckpointError(
                f"{name} must be of shape {list(slot.shape)} and {self.dtype}, "
                f"got {list(tensor.shape)} and {tensor.dtype}"
            )
        if name not in self._missing:
            raise CheckpointError(f"{name} was loaded before")
        del self._missing[name]
        slot.fill(tensor.to(self._device))

    def __call__(
        self, input_ids: Tensor, positions: Tensor, attention: Sequence[AttentionBatch], storages: Sequence[PagedKV]
    ) -> Tensor:
        """Run the layers over a step's rows; keys and values of the rows are stored on the way.

        Args:
            input_ids: [T] of int64.
            positions: [T] of int64.
            attention: one for each cache group.
            storages: one for each cache group.

        Returns:
            Hidden states [T, E], before the last norm.
        """
        ops = self._ops
        steps = [ops.step_attention(batch, kv) for batch, kv in zip(attention, storages, strict=True)]
        rotations = [rotation(positions) for rotation in self._rotations]
        x = ops.embedding(input_ids, self._embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        for mixer_norm, mixer, ffn_norm, ffn, rotation_idx, group_idx in self._layers:
            x = mixer(mixer_norm(x), x, rotations[rotation_idx], steps[group_idx])
            x = ffn(ffn_norm(x), x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [R, V], float32, of hidden states [R, E]."""
        logits = self._head.run(self._norm(hidden)).float()
        cap = self.spec.logit_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _fill_embedding(self, tensor: Tensor) -> None:
        """Keep the matrix for look-ups; a tied head takes it too.

        A packed head costs a second copy of the matrix (311 MB for 151936 x 1024 in bfloat16): a packed matrix has no
        rows to look up, and as a head the plain one takes one and a half times as long at one row, and twice at 16.
        """
        self._embedding = tensor
        if self.spec.tied_head:
            self._head.slots["weight"].fill(tensor)
