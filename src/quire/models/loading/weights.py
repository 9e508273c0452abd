"""Loading of a checkpoint's tensors into the parameters of a decoder or an encoder, one at a time."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.errors import CheckpointError, shown
from quire.models.adapters.merging import MergedAdapter
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.finite_values import MOST_BROKEN_ROWS, check_finite, place_of
from quire.models.checkpoints.tensor_reader import TensorReader, join_parts
from quire.models.families.vision_towers import is_of_vision
from quire.models.modules.decoder import Decoder
from quire.models.modules.encoder import Encoder
from quire.models.modules.vision_encoder import VisionEncoder
from quire.models.specs.sharding import Split
from quire.models.specs.spec import WeightMap
from quire.models.tensors.dtypes import DTYPES, STORED_DTYPES
from quire.models.tensors.layer_weight import LayerWeight

EMBEDDING = "embedding.weight"
# Suffixes of tensors that no model needs: they are left over from training, or tied to a tensor that is read. Stored
# scales of activations, keys and values are not used, because these are quantised by their own scales here.
HARMLESS_SUFFIXES = (
    *("rotary_emb.inv_freq", "lm_head.weight"),
    # The pooler of BERT is a head that embeddings do not use; the ids are 0, 1, 2, ...
    *("pooler.dense.weight", "pooler.dense.bias", "embeddings.position_ids"),
    # Causal masks of GPT-2.
    *(".attn.bias", ".attn.masked_bias"),
    *("input_scale", "input_zero_point", "activation_scale"),
    *("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point"),
)

logger = logging.getLogger(__name__)


def choose_dtype(option: str, checkpoint: Checkpoint) -> torch.dtype:
    """Choose the dtype of the weights; pure.

    Args:
        option: "bfloat16", "float16", "float32", or "auto" for the dtype in the checkpoint's configuration, or else the
            dtype of most of its values.
        checkpoint: the model's files.

    Raises:
        CheckpointError: "auto", and no kernel supports the checkpoint's dtype.
    """
    if option != "auto":
        return DTYPES[option]
    # Older configurations have "torch_dtype" in place of "dtype".
    name = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or _prevailing(checkpoint)
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(
            f"the checkpoint in {checkpoint.folder} is of dtype {shown(name)}, and auto keeps it: set dtype to one of "
            f"{', '.join(DTYPES)}",
            field="dtype",
        )
    return DTYPES[name]


def load_weights(
    checkpoint: Checkpoint,
    weight_map: WeightMap,
    model: Decoder | Encoder | VisionEncoder,
    splits: Mapping[str, Split] | None = None,
    merged: MergedAdapter | None = None,
) -> None:
    """Fill a model's parameters from a checkpoint.

    All names, shapes and dtypes are checked before the first byte is read. Files are memory-mapped, and pages are
    released after each parameter, so that only the model and one parameter are in memory.

    Args:
        checkpoint: the model's files.
        weight_map: parameter name -> names of the stored tensors that make it up, concatenated on dimension 0.
        model: model to fill; tensors of other dtypes than its parameters are cast.
        splits: parts of weights that the model takes; other weights are taken whole. None for no parts.
        merged: adapter that is merged into the weights; None for none.

    Raises:
        CheckpointError: a tensor is missing, has a wrong shape or dtype, or values that are not finite; the message
            names it.
    """
    shapes, splits = model.weights.shapes(), splits or {}
    weight_map = {name: tuple(checkpoint.sources_of(sources)) for name, sources in weight_map.items()}
    reader = TensorReader(checkpoint)
    for name, shape in shapes.items():
        whole = splits[name].whole_shape(shape) if name in splits else shape
        _check_parameter(checkpoint, reader, name, whole, weight_map[name])
    if not isinstance(model, VisionEncoder):
        _warn_of_unused(checkpoint, reader, weight_map)
    for name, shape in shapes.items():
        parts = [_as_rows(reader.read(source), len(shape)) for source in weight_map[name]]
        dtype = model.weights.dtype(name)
        if merged is not None:  # into whole weights, before they are split
            for source, part in zip(weight_map[name], parts, strict=True):
                check_finite(checkpoint, source, part, most=MOST_BROKEN_ROWS if name == EMBEDDING else 0.0)
            parts = [
                merged.add_to(source, part, dtype) if isinstance(part, Tensor) else part
                for source, part in zip(weight_map[name], parts, strict=True)
            ]
        if name in splits:
            parts = splits[name].cut(parts, name)
        # A split may return fewer or more parts than sources, and does not name the source of each.
        sources = weight_map[name] if len(parts) == len(weight_map[name]) else weight_map[name][:1] * len(parts)
        for source, part in zip(sources, parts, strict=True):
            check_finite(checkpoint, source, part, most=MOST_BROKEN_ROWS if name == EMBEDDING else 0.0)
        model.weights.load(name, join_parts(parts, shape, dtype))
        reader.let_go(weight_map[name])


def _check_parameter(
    checkpoint: Checkpoint, reader: TensorReader, name: str, shape: tuple[int, ...], sources: tuple[str, ...]
) -> None:
    # A source occurs twice if keys are also the values.
    shapes = [_rows_shape(reader.shape(source, name), len(shape)) for source in sources]
    for source, stored in zip(sources, shapes, strict=True):
        if stored[1:] != shape[1:] or not stored:
            raise CheckpointError(
                f"{place_of(checkpoint, source)} holds tensor {shown(source)} of shape {list(stored)}, which does not "
                f"fit into {name} of shape {list(shape)}"
            )
    rows = sum(stored[0] for stored in shapes)
    if rows != shape[0]:
        parts = ", ".join(f"{source} {list(stored)}" for source, stored in zip(sources, shapes, strict=True))
        raise CheckpointError(
            f"{name} needs shape {list(shape)}, but the checkpoint in {checkpoint.folder} gives {rows} rows ({parts})"
        )


def _rows_shape(shape: tuple[int, ...], num_dims: int) -> tuple[int, ...]:
    """Return the shape of a tensor as it is read: stacked experts [X, out, in] are read as [X * out, in]."""
    return shape if len(shape) != num_dims + 1 else (shape[0] * shape[1], *shape[2:])


def _as_rows(tensor: Tensor | LayerWeight, num_dims: int) -> Tensor | LayerWeight:
    return tensor.flatten(0, 1) if isinstance(tensor, Tensor) and tensor.dim() == num_dims + 1 else tensor


def _warn_of_unused(checkpoint: Checkpoint, reader: TensorReader, weight_map: WeightMap) -> None:
    used = {part for sources in weight_map.values() for source in sources for part in reader.parts_of(source)}
    others = [name for name in checkpoint.tensors.keys() - used if not is_of_vision(checkpoint.config, name)]
    unused = sorted(name for name in others if not name.endswith(HARMLESS_SUFFIXES))
    if unused:
        shown = ", ".join(unused[:8]) + (", ..." if len(unused) > 8 else "")
        logger.warning("%d tensors of the checkpoint are not part of the model: %s", len(unused), shown)


def _prevailing(checkpoint: Checkpoint) -> str:
    """Return the name of the dtype of most of the checkpoint's values."""
    sizes: Counter[str] = Counter()
    for stored in checkpoint.tensors.values():
        size = 1
        for length in stored.shape:
            size *= length
        sizes[STORED_DTYPES.get(stored.dtype, stored.dtype)] += size
    return max(sizes, key=lambda name: sizes[name], default="float32")
