"""Query, key and value projections that a file has in one tensor, their rows one after the other.

llama.cpp's converter writes them with `--fuse-qkv`. Each of the three is a range of rows, and is reordered after it is
cut out.
"""

from __future__ import annotations

import re
from typing import Final

from quire.errors import CheckpointError, shown
from quire.models.gguf.architectures.sources import RowRange, Shapes
from quire.models.specs.spec import Attention, LayerSpec, ModelSpec

# Layers of linear attention have a tensor of this name too, but no `attn_output`.
_FUSED: Final = re.compile(r"blk\.(\d+)\.attn_qkv\.(weight|bias)")
PARTS: Final = ("attn_q", "attn_k", "attn_v")


def with_parts(shapes: Shapes) -> Shapes:
    """Return the shapes, with the parts of fused tensors under the shapes of these: their own are not known yet."""
    return {**{part: shapes[name] for name in _fused(shapes) for part in _parts_of(name)}, **shapes}


def find_ranges(shapes: Shapes, spec: ModelSpec) -> dict[str, RowRange]:
    """Return the range of rows of each part of the fused tensors, by the part's name."""
    ranges: dict[str, RowRange] = {}
    layers = [*spec.layers, *([] if spec.mtp is None else [spec.mtp])]
    for name, idx in _fused(shapes).items():
        attention = _attention(layers[idx]) if idx < len(layers) else None
        if attention is None:
            continue
        keys = attention.num_kv_heads * attention.head_dim
        counts = (attention.num_heads * attention.head_dim * (1 + attention.output_gate), keys, keys)
        if shapes[name][0] != sum(counts):
            raise CheckpointError(
                f"the tensor {shown(name)} has {shapes[name][0]:,} rows, and the layer's queries, keys and values have "
                f"{counts[0]:,}, {keys:,} and {keys:,}",
                field=name,
            )
        start = 0
        for part, count in zip(_parts_of(name), counts, strict=True):
            ranges[part] = RowRange(name, start, count)
            start += count
    return ranges


def _fused(shapes: Shapes) -> dict[str, int]:
    """Return the fused tensors of attention layers, with the numbers of the layers."""
    matches = [match for name, shape in shapes.items() if shape and (match := _FUSED.fullmatch(name))]
    return {match[0]: int(match[1]) for match in matches if f"blk.{match[1]}.attn_output.weight" in shapes}


def _parts_of(name: str) -> list[str]:
    return [name.replace("attn_qkv", part) for part in PARTS]


def _attention(layer: LayerSpec) -> Attention | None:
    return next((part for part in layer.parts if isinstance(part, Attention)), None)
