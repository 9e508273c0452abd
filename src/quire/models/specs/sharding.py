"""Tensor parallelism as data: the part of a model that a rank computes, and the part of each weight that it reads.

Projections to heads, gated columns and channels are split by outputs, projections to hidden states by inputs, so that
each half of a layer ends with one sum over the ranks. Embedding and head are split by tokens.
Norms and routers are small; each rank has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.errors import ConfigError
from quire.models.specs.spec import (
    FFN,
    Attention,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    LayerSpec,
    Mamba2,
    Mixer,
    MLPBesideExperts,
    ModelSpec,
    Parallel,
    PlainMLP,
    ShortConv,
)
from quire.models.tensors.layer_weight import LayerWeight

# A rank's part of the vocabulary is a multiple of this number of tokens, which fill panels of packed weights.
VOCAB_ALIGNMENT = 64

Range = tuple[int, int]


class Share(NamedTuple):
    """A rank of a tensor-parallel group.

    Args:
        rank: number of the rank.
        size: number of ranks.
        by_expert: True if each rank has whole experts instead of columns of each expert.
    """

    rank: int
    size: int
    by_expert: bool = False

    def part(self, length: int, start: int = 0) -> Range:
        """Return the rank's range of a section of some length, which `size` divides."""
        width = length // self.size
        return start + self.rank * width, start + (self.rank + 1) * width

    def vocabulary(self, vocab_size: int) -> Range:
        """Return the rank's range of the vocabulary, not empty if there are at least as many tokens as ranks."""
        rank, size, _ = self
        if vocab_size < VOCAB_ALIGNMENT * size**2:
            return rank * vocab_size // size, (rank + 1) * vocab_size // size
        width = -(-vocab_size // (size * VOCAB_ALIGNMENT)) * VOCAB_ALIGNMENT
        return min(rank * width, vocab_size), min((rank + 1) * width, vocab_size)

    def widths(self, vocab_size: int) -> list[int]:
        """Return the number of tokens of each rank."""
        ranges = (Share(rank, self.size).vocabulary(vocab_size) for rank in range(self.size))
        return [end - first for first, end in ranges]


def share_of(ranks: RankGroup | None) -> Share:
    """Return the share of a rank; the whole model for None."""
    return Share(0, 1) if ranks is None else Share(ranks.rank, ranks.size, ranks.divides_experts)


class Split(NamedTuple):
    """The part of a weight that a rank reads.

    Args:
        dim: dimension that is cut; None for a bias that is added after a sum over ranks, which only rank 0 has.
        ranges: the rank's ranges of this dimension, rising.
        length: full length of this dimension.
        is_first: True on the first rank.
        then: further split of this part, along another dimension; None for none.
    """

    dim: int | None
    ranges: tuple[Range, ...] = ()
    length: int = 0
    is_first: bool = True
    then: Split | None = None

    def whole_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole weight from the part's shape."""
        if self.then is not None:
            shape = self.then.whole_shape(shape)
        if self.dim is None:
            return shape
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    def cut(self, parts: Sequence[Tensor | LayerWeight], name: str) -> list[Tensor | LayerWeight]:
        """Return the rank's part of a weight, as views of the stored `parts`, which are concatenated on dimension 0."""
        if self.then is not None:
            return self.then.cut(self._replace(then=None).cut(parts, name), name)
        if self.dim is None:
            return list(parts) if self.is_first else [torch.zeros_like(part) for part in parts if _is_plain(part)]
        if self.dim > 0:
            return [self._cut_columns(part, self.dim, name) for part in parts]
        cut: list[Tensor | LayerWeight] = []
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + _num_rows(part))
        idx = 0
        for first, end in self.ranges:
            while first < end:
                while starts[idx + 1] <= first:
                    idx += 1
                last = min(end, starts[idx + 1])
                rows = slice(first - starts[idx], last - starts[idx])
                part = parts[idx]
                cut.append(
                    part._replace(weight=part.weight.rows(rows)) if isinstance(part, LayerWeight) else part[rows]
                )
                first = last
        return cut

    def _cut_columns(self, part: Tensor | LayerWeight, dim: int, name: str) -> Tensor | LayerWeight:
        if not isinstance(part, LayerWeight):
            columns = [part.narrow(dim, first, end - first) for first, end in self.ranges]
            return columns[0] if len(columns) == 1 else torch.cat(columns, dim)
        ((first, end),) = self.ranges
        weight = None if part.input_order is not None else part.weight.columns(first, end)
        if weight is None:
            why = "are in another order" if part.input_order is not None else "share scales across ranks"
            raise ConfigError(
                f"tensor_parallel_size cannot split {name}: its inputs as the checkpoint stores them {why}; use fewer "
                "ranks, or a checkpoint that is not quantised",
                field="tensor_parallel_size",
            )
        return part._replace(weight=weight)


def _is_plain(part: Tensor | LayerWeight) -> TypeGuard[Tensor]:
    assert isinstance(part, Tensor), "biases are not quantised"
    return True


def _num_rows(part: Tensor | LayerWeight) -> int:
    return part.weight.shape[0] if isinstance(part, LayerWeight) else part.shape[0]


def shard_spec(spec: ModelSpec, share: Share) -> ModelSpec:
    """Return the rank's part of a model, with the whole model's vocabulary and width.

    Raises:
        ConfigError: the heads or columns of a layer cannot be divided among the ranks; the message names them.
    """
    return replace(spec, layers=tuple(_shard_layer(layer, share, idx) for idx, layer in enumerate(spec.layers)))


def _shard_layer(layer: LayerSpec, share: Share, idx: int) -> LayerSpec:
    mixer = layer.mixer
    if isinstance(mixer, Parallel):
        parts = tuple(_shard_mixer(part, share.size, idx) for part in mixer.parts)
        return replace(layer, mixer=replace(mixer, parts=parts), ffn=_shard_ffn(layer.ffn, share, idx))
    part = None if mixer is None else _shard_mixer(mixer, share.size, idx)
    return replace(layer, mixer=part, ffn=_shard_ffn(layer.ffn, share, idx))


def _shard_mixer(mixer: Mixer, size: int, idx: int) -> Mixer:
    match mixer:
        case Attention():
            num_heads = _divided(mixer.num_heads, size, "query heads", idx)
            if size % mixer.num_kv_heads == 0:  # several ranks have the same head
                return replace(mixer, num_heads=num_heads, num_kv_heads=1)
            return replace(mixer, num_heads=num_heads, num_kv_heads=_divided(mixer.num_kv_heads, size, "KV heads", idx))
        case ShortConv():
            return replace(mixer, num_channels=_divided(mixer.num_channels, size, "channels", idx))
        case Mamba2():
            num_heads = _divided(mixer.num_heads, size, "heads", idx)
            if size % mixer.num_groups == 0 and mixer.norm is None:
                return replace(mixer, num_heads=num_heads, num_groups=1)
            num_groups = _divided(mixer.num_groups, size, "groups of heads, each of which is normed whole,", idx)
            return replace(mixer, num_heads=num_heads, num_groups=num_groups)
        case GatedDeltaNet():
            return replace(
                mixer,
                num_key_heads=_divided(mixer.num_key_heads, size, "key heads", idx),
                num_value_heads=_divided(mixer.num_value_heads, size, "value heads", idx),
            )


def _shard_ffn(ffn: FFN | None, share: Share, idx: int) -> FFN | None:
    size = share.size
    match ffn:
        case None:
            return None
        case GatedMLP(cutoff=float()):
            raise ConfigError(
                f"tensor_parallel_size must be 1, got {size}: the gates of layer {idx} are cut off by the mean of all "
                "of them",
                field="tensor_parallel_size",
            )
        case GatedMLP() | PlainMLP():
            return replace(ffn, width=_divided(ffn.width, size, "columns", idx))
        case Experts():
            shared_width = _divided(ffn.shared_width, size, "columns of the shared expert", idx)
            if share.by_expert:
                _divided(ffn.num_experts, size, "experts", idx)
                return replace(ffn, local=share.part(ffn.num_experts), shared_width=shared_width)
            width = _divided(ffn.width, size, "columns of each expert", idx)
            return replace(ffn, width=width, shared_width=shared_width)
        case MLPBesideExperts():
            mlp, experts = _shard_ffn(ffn.mlp, share, idx), _shard_ffn(ffn.experts, share, idx)
            assert isinstance(mlp, GatedMLP)
            assert isinstance(experts, Experts)
            return replace(ffn, mlp=mlp, experts=experts)


def _divided(count: int, size: int, what: str, idx: int) -> int:
    if count % size:
        raise ConfigError(
            f"tensor_parallel_size must divide the {count} {what} of layer {idx}, got {size}",
            field="tensor_parallel_size",
        )
    return count // size


def splits_of(spec: ModelSpec, share: Share) -> dict[str, Split]:
    """Return the splits of a rank's weights, by the decoder's names; other weights are read whole.

    Args:
        spec: specification of the whole model.
        share: the rank.
    """
    cut = _Cut(share, spec.width)
    vocabulary = Split(0, (share.vocabulary(spec.vocab_size),), spec.vocab_size)
    splits = {"embedding.weight": vocabulary, "head.weight": vocabulary}
    if spec.per_layer_inputs is not None:
        size = spec.per_layer_inputs.vocab_size
        splits["per_layer_inputs.embedding.weight"] = Split(0, (share.vocabulary(size),), size)
    for idx, layer in enumerate(spec.layers):
        if isinstance(layer.mixer, Parallel):
            mixers = {f"mixer.{part_idx}": part for part_idx, part in enumerate(layer.mixer.parts)}
        else:
            mixers = {} if layer.mixer is None else {"mixer": layer.mixer}
        parts = [(name, cut.mixer(mixer)) for name, mixer in mixers.items()]
        ffns = [] if layer.ffn is None else [("ffn", cut.ffn(layer.ffn))]
        for name, of_part in (*parts, *ffns):
            splits |= {f"layers.{idx}.{name}.{weight}": split for weight, split in of_part.items()}
    return splits


class _Cut:
    """The splits of a layer's parts, by the weight's name in the part."""

    def __init__(self, share: Share, width: int) -> None:
        self._share, self._width = share, width

    def mixer(self, mixer: Mixer) -> Mapping[str, Split]:
        match mixer:
            case Attention():
                return dict(self._attention(mixer))
            case ShortConv():
                channels = mixer.num_channels
                return {
                    **self._by_rows("input", [channels] * 3),
                    **self._by_rows("conv", [channels]),
                    **self._by_columns("output", channels),
                }
            case Mamba2():
                return self._mamba2(mixer)
            case GatedDeltaNet():
                keys, heads = mixer.num_key_heads * mixer.key_dim, mixer.num_value_heads
                sections = [keys, keys, mixer.inner, mixer.inner, heads, heads]
                if mixer.by_key_head:
                    sections = [sum(sections[:4]), sum(sections[4:])]
                return {
                    **self._by_rows("input", sections),
                    **self._by_rows("conv", [keys, keys, mixer.inner]),
                    "A_log": self._rows([heads]),
                    "dt_bias": self._rows([heads]),
                    **self._by_columns("output", mixer.inner),
                }

    def ffn(self, ffn: FFN) -> Mapping[str, Split]:
        match ffn:
            case GatedMLP() | PlainMLP():
                return self._mlp(ffn)
            case Experts():
                return self._experts(ffn)
            case MLPBesideExperts():
                parts = {"mlp": self._mlp(ffn.mlp), "experts": self._experts(ffn.experts)}
                return {f"{part}.{name}": split for part, splits in parts.items() for name, split in splits.items()}

    def _attention(self, attention: Attention) -> Iterator[tuple[str, Split]]:
        queries = attention.num_heads * attention.head_dim
        if attention.source is not None:
            yield from self._by_rows("q", [queries]).items()
        else:
            stored = 2 * queries if attention.output_gate else queries
            split = self._with_groups([stored], attention.num_kv_heads, [attention.head_dim] * 2)
            yield "qkv.weight", split
            yield "qkv.bias", split
        if attention.joint_qk_norm:
            yield "q_norm.weight", self._rows([queries])
            yield "k_norm.weight", self._with_groups([], attention.num_kv_heads, [attention.head_dim])
        yield from self._by_columns("output", queries).items()
        yield "sinks.weight", self._rows([attention.num_heads])

    def _mamba2(self, mamba: Mamba2) -> Mapping[str, Split]:
        inner, groups, written = mamba.inner, mamba.num_groups, [mamba.state_dim] * 2
        projected = self._with_groups([inner, inner], groups, written, [mamba.num_heads])
        convolved = self._with_groups([inner], groups, written)
        return {
            **{f"input.{kind}": projected for kind in ("weight", "bias")},
            **{f"conv.{kind}": convolved for kind in ("weight", "bias")},
            **{name: self._rows([mamba.num_heads]) for name in ("A_log", "dt_bias", "D")},
            "norm.weight": self._rows([inner]),
            **self._by_columns("output", inner),
        }

    def _mlp(self, mlp: GatedMLP | PlainMLP) -> Mapping[str, Split]:
        first = {"up": [mlp.width]} if isinstance(mlp, PlainMLP) else {"gate_up": [mlp.width] * 2}
        ((name, sections),) = first.items()
        return {**self._by_rows(name, sections), **self._by_columns("down", mlp.width)}

    def _experts(self, experts: Experts) -> Mapping[str, Split]:
        splits = self._whole_experts(experts) if self._share.by_expert else self._columns_of_experts(experts)
        if experts.shared is not None:
            splits |= {f"shared.{name}": split for name, split in self._mlp(experts.shared).items()}
        return splits

    def _whole_experts(self, experts: Experts) -> dict[str, Split]:
        """Give whole experts to each rank."""
        outputs = {"gate_up": experts.gate_up_width, "down": self._width}
        splits = {
            f"{name}.{kind}": self._rows([experts.num_experts * width])
            for name, width in outputs.items()
            for kind in ("weight", "bias")
        }
        if experts.transposed:
            splits |= {f"{name}.weight": self._rows([experts.num_experts]) for name in outputs}
        return splits

    def _columns_of_experts(self, experts: Experts) -> dict[str, Split]:
        """Split the gated columns of each expert."""
        # Gate and up of a column alternate, or all gates come before all ups.
        num_rows = experts.gate_up_width
        sections = [num_rows] if experts.interleaved else [experts.width] * (num_rows // experts.width)
        rows = self._rows(sections * experts.num_experts)
        columns = self._share.part(experts.width)
        return {
            "gate_up.weight": self._rows(sections, dim=2) if experts.transposed else rows,
            "gate_up.bias": rows,
            "down.weight": Split(1, (columns,), experts.width),
            "down.bias": self._summed(),
        }

    def _by_rows(self, name: str, sections: Sequence[int]) -> dict[str, Split]:
        """Split a layer by its outputs: each rank has a part of each section."""
        return {f"{name}.{kind}": self._rows(sections) for kind in ("weight", "bias")}

    def _by_columns(self, name: str, length: int) -> dict[str, Split]:
        """Split a layer by its inputs."""
        return {f"{name}.weight": Split(1, (self._share.part(length),), length), f"{name}.bias": self._summed()}

    def _rows(self, sections: Sequence[int], dim: int = 0) -> Split:
        ranges, start = [], 0
        for length in sections:
            ranges.append(self._share.part(length, start))
            start += length
        return Split(dim, tuple(ranges), start)

    def _with_groups(
        self, before: Sequence[int], num_groups: int, widths: Sequence[int], after: Sequence[int] = ()
    ) -> Split:
        """Split rows with sections for groups of heads; with fewer groups than ranks, ranks share groups."""
        rank, size, _ = self._share
        ranges, start = list(self._rows(before).ranges), sum(before)
        for width in widths:
            if size % num_groups == 0:
                first = start + rank * num_groups // size * width
                ranges.append((first, first + width))
            else:
                ranges.append(self._share.part(num_groups * width, start))
            start += num_groups * width
        for length in after:
            ranges.append(self._share.part(length, start))
            start += length
        return Split(0, tuple(ranges), start)

    def _summed(self) -> Split:
        return Split(None, is_first=self._share.rank == 0)
