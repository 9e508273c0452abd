"""Construction of a decoder or an encoder from a checkpoint, and of the slots for its adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from quire.config import Quantization
from quire.distributed.pipeline import PipelineGroup
from quire.distributed.rank_group import RankGroup
from quire.errors import ConfigError
from quire.models.adapters.expert_layers import ExpertLayers
from quire.models.adapters.merging import module_shapes, read_merged
from quire.models.adapters.peft_folder import ModuleShape
from quire.models.adapters.slots import AdapterSlots
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.columns import with_rows
from quire.models.checkpoints.tensor_reader import TensorReader
from quire.models.families import build
from quire.models.families.encoders import build_encoder
from quire.models.families.quantization_config import without_quantization
from quire.models.hosted.choice import read_decoder
from quire.models.loading.sizes import check_sizes
from quire.models.loading.weights import load_weights
from quire.models.modules.causal_model import CausalModel
from quire.models.modules.decoder import Decoder
from quire.models.modules.encoder import Encoder
from quire.models.modules.stages import StageDecoder, part_of
from quire.models.specs.hosted_spec import HostedSpec
from quire.models.specs.sharding import Split, shard_spec, share_of, splits_of
from quire.models.specs.spec import Attention, LayerSpec, ModelSpec, PlainMLP, WeightMap, experts_of
from quire.models.specs.stage_spec import renamer
from quire.ops import make_ops
from quire.ops.cpu.native_library import MAX_HEAD_DIM
from quire.ops.interface.ops import Ops


def load_decoder(
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: torch.dtype,
    kernels: str = "auto",
    model_impl: str = "auto",
    quantization: Quantization | None = None,
    weight_packing: str = "auto",
    deterministic: bool = False,
    max_model_len: int | None = None,
    wrap_ops: Callable[[Ops], Ops] | None = None,
    adapter: Path | None = None,
    max_lora_rank: int = 0,
    ranks: RankGroup | None = None,
) -> CausalModel:
    """Build a checkpoint's decoder, and load its weights.

    Args:
        checkpoint: the model's files.
        device: "cpu" or "cuda".
        dtype: dtype of weights, hidden states and cache, from `choose_dtype`.
        model_impl: see `ModelConfig`.
        kernels, quantization, weight_packing, deterministic: kernels and the form of weights; see
            `quire.ops.make_ops`.
        max_model_len: longest context that is served, in tokens; None for the model's own limit.
        wrap_ops: function from the backend's kernels to the kernels of the decoder; None for the backend's own.
        adapter: folder of an adapter that is merged into the weights; None for none.
        max_lora_rank: largest rank of this adapter.
        ranks: ranks that share the model; this one reads its own parts of the weights. None for one process.

    Raises:
        ConfigError: kernels or a form of weights are not available; or the model cannot be divided among ranks, is not
            deterministic, or cannot take a merged adapter.
        UnsupportedModel: no family implements the architecture or one of its options.
        CheckpointError: a tensor or a field is missing or wrong.
    """
    _check_packing(weight_packing, dtype)
    spec, weight_map = read_decoder(checkpoint.config, model_impl)
    if max_model_len is not None:
        spec = spec.for_context(max_model_len)
    torch_device = torch.device(device)
    if isinstance(spec, HostedSpec):
        from quire.models.loading.hosting import check_hosted, load_hosted  # imports transformers

        check_hosted(checkpoint, deterministic=deterministic, adapter=adapter, ranks=ranks)
        ops = make_ops(torch_device, kernels, quantization, weight_packing)
        return load_hosted(checkpoint, spec, ops if wrap_ops is None else wrap_ops(ops), dtype, torch_device)
    checkpoint = with_rows(checkpoint)
    check_sizes(spec, checkpoint.tensors)
    if deterministic:
        check_deterministic(spec)
    ops = make_ops(torch_device, kernels, quantization, weight_packing, deterministic)
    if wrap_ops is not None:
        ops = wrap_ops(ops)
    decoder, own_map, splits = _make_decoder(spec, weight_map, ops, dtype, torch_device, ranks)
    merged = None
    if adapter is not None:
        modules = _adapted_modules(checkpoint, spec, weight_map, decoder, ranks)
        merged = read_merged(adapter, checkpoint, modules, ExpertLayers(spec, weight_map), weight_map, max_lora_rank)
        decoder.merged_adapter = merged.digest
    load_weights(checkpoint, own_map, decoder, splits, merged)
    return decoder


def _make_decoder(
    spec: ModelSpec, weight_map: WeightMap, ops: Ops, dtype: torch.dtype, device: torch.device, ranks: RankGroup | None
) -> tuple[Decoder, WeightMap, Mapping[str, Split] | None]:
    """Return the decoder of this process without weights, its weight map, and the splits of its weights."""
    if isinstance(ranks, PipelineGroup):
        part = part_of(spec, weight_map, ranks)
        return StageDecoder(part, ops=ops, dtype=dtype, device=device, group=ranks), part.weight_map, part.splits
    splits = None
    if ranks is not None:
        share = share_of(ranks)
        splits, spec = splits_of(spec, share), shard_spec(spec, share)
    return Decoder(spec, ops=ops, dtype=dtype, device=device, ranks=ranks), weight_map, splits


def _adapted_modules(
    checkpoint: Checkpoint, spec: ModelSpec, weight_map: WeightMap, decoder: Decoder, ranks: RankGroup | None
) -> Mapping[str, ModuleShape]:
    """Return the widths of the modules of a whole model that take adapters, by `module_key`."""
    # A part has slots of other shapes, or for some layers only. The weights of this whole decoder are not loaded.
    whole = decoder if ranks is None else Decoder(spec, ops=decoder.ops, dtype=decoder.dtype, device=decoder.device)
    return module_shapes(whole.weights.slots, weight_map, _row_counter(checkpoint))


def load_encoder(
    checkpoint: Checkpoint,
    *,
    device: str,
    dtype: torch.dtype,
    kernels: str = "auto",
    quantization: Quantization | None = None,
    weight_packing: str = "auto",
    wrap_ops: Callable[[Ops], Ops] | None = None,
) -> Encoder:
    """Build a checkpoint's encoder, and load its weights; for arguments and errors, see `load_decoder`."""
    _check_packing(weight_packing, dtype)
    spec, weight_map = build_encoder(without_quantization(checkpoint.config))
    check_sizes(spec, checkpoint.tensors)
    ops = make_ops(torch.device(device), kernels, quantization, weight_packing)
    encoder = Encoder(spec, ops=ops if wrap_ops is None else wrap_ops(ops), dtype=dtype, device=torch.device(device))
    load_weights(checkpoint, weight_map, encoder)
    return encoder


def _check_packing(weight_packing: str, dtype: torch.dtype) -> None:
    if weight_packing == "lossless" and dtype != torch.bfloat16:
        raise ConfigError(
            f"weight_packing 'lossless' is for dtype bfloat16, and weights are of {str(dtype).removeprefix('torch.')}; "
            "use 'plain', or dtype 'bfloat16'",
            field="weight_packing",
        )


def make_adapter_slots(
    checkpoint: Checkpoint, decoder: CausalModel, max_rank: int, ranks: RankGroup | None = None
) -> AdapterSlots:
    """Make the linear layers of a decoder take adapters.

    Args:
        checkpoint: the decoder's files.
        decoder: decoder with all its weights.
        max_rank: largest rank of an adapter.
        ranks: ranks that share the decoder; None for one process.
    """
    if not isinstance(decoder, Decoder):
        from quire.models.loading.hosting import make_hosted_slots  # imports transformers

        return make_hosted_slots(decoder, max_rank)
    checkpoint = with_rows(checkpoint)
    spec, weight_map = build(without_quantization(checkpoint.config))
    modules = _adapted_modules(checkpoint, spec, weight_map, decoder, ranks)
    experts, row_count = ExpertLayers(spec, weight_map), _row_counter(checkpoint)
    if isinstance(ranks, PipelineGroup):
        part = part_of(spec, weight_map, ranks)
        own_name = renamer(part.stage)
        return AdapterSlots(
            decoder, part.weight_map, row_count, max_rank, experts, modules, part.splits, own_name=own_name
        )
    splits = None if ranks is None else splits_of(spec, share_of(ranks))
    return AdapterSlots(decoder, weight_map, row_count, max_rank, experts, modules, splits)


def _row_counter(checkpoint: Checkpoint) -> Callable[[str], int]:
    """Return a function from the name of a tensor of the family to its number of rows."""
    reader = TensorReader(checkpoint)

    def row_count(name: str) -> int:
        return sum(reader.shape(source, name)[0] for source in checkpoint.sources_of([name]))

    return row_count


def check_deterministic(spec: ModelSpec) -> None:
    """Reject a model with a part whose results depend on the batch, or are not shown to be independent of it.

    Chunks of a recurrence are summed differently than single rows; stock vectorised operators round sigmoids of the
    remaining elements, and scaled sums, differently.
    """
    hindrance = next((part for layer in spec.layers for part in hindrances(layer)), None)
    if spec.per_layer_inputs is not None:
        hindrance = "what every layer is told of a token besides the hidden state"
    if hindrance is not None:
        raise ConfigError(
            f"deterministic is for models of attention and gated MLPs, and this one has {hindrance}: leave "
            "deterministic out",
            field="deterministic",
        )


def hindrances(layer: LayerSpec) -> list[str]:
    """Return the names of a layer's parts that may depend on the batch."""
    names = []
    for part in layer.parts:
        if not isinstance(part, Attention):
            names.append("a recurrent state")
        elif part.output_gate:
            names.append("gates on what attention gathers")
        elif part.head_dim > MAX_HEAD_DIM or part.head_dim % 2:
            names.append(f"heads of {part.head_dim} values, not an even number up to {MAX_HEAD_DIM}")
    if isinstance(layer.ffn, PlainMLP):
        names.append("activations without gates")
    experts = experts_of(layer.ffn)
    if experts is not None and experts.scoring == "sigmoid":
        names.append("experts scored by a sigmoid")
    if experts is not None and experts.shared_gate:
        names.append("a gate on a shared expert")
    if layer.mixer_scale != 1.0 or layer.ffn_scale != 1.0:
        names.append("scaled additions to the hidden state")
    return names
