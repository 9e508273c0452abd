"""Writer of compressed-tensors folders, which `quire.models.stored_quantization.compressed_tensors` reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import TensorSpec, serialize_file
from torch import Tensor

from quire.cli.quantization.rounding import QuantizedMatrix, Scheme
from quire.models.checkpoints.checkpoint import HUB_FILES, INDEX_FILE, SINGLE_FILE, Checkpoint

# Tensors are kept in memory until a file has this number of bytes.
SHARD_BYTES: Final = 1 << 30
# Files of a checkpoint that are copied in addition to its weights.
COPIED: Final = (*(name for name in HUB_FILES if name != "*.safetensors"), "LICENSE*", "NOTICE*")
CONFIG_FILE: Final = "config.json"


def quantization_config(scheme: Scheme, plain_layers: Iterable[str]) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint."""
    layout = "pack-quantized" if scheme.bits == 4 else "int-quantized"
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "group" if scheme.group_size else "channel",
        "group_size": scheme.group_size,
        "dynamic": False,
        "observer": "minmax",
    }
    # With 8-bit weights, activations are quantised to 8 bits too, per token.
    activations = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "ignore": ["lm_head", *plain_layers],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None if scheme.bits == 4 else activations,
                "output_activations": None,
                "format": layout,
            }
        },
    }


def pack(matrix: QuantizedMatrix, scheme: Scheme) -> dict[str, Tensor]:
    """Return the stored tensors of a layer, by the suffixes of their names."""
    scales, zero_points = matrix.factors
    if scheme.bits == 8:
        return {".weight": (matrix.codes ^ 128).view(torch.int8), ".weight_scale": scales.contiguous()}
    stored = {
        ".weight_packed": pack_columns(matrix.codes),
        ".weight_scale": scales.contiguous(),
        ".weight_shape": torch.tensor(matrix.codes.shape, dtype=torch.int64),
    }
    if not scheme.symmetric:
        # Zero points are packed along the outputs.
        stored[".weight_zero_point"] = pack_columns(zero_points.to(torch.uint8).t().contiguous()).t().contiguous()
    return stored


def pack_columns(codes: Tensor) -> Tensor:
    """Pack 4-bit codes into 32-bit words, the first column in the lowest bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    return (padded[:, ::2] | padded[:, 1::2] << 4).view(torch.int32)


class FolderWriter:
    """Writes a checkpoint folder, tensor by tensor."""

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        folder.mkdir()
        self._folder, self._shard_bytes = folder, shard_bytes
        self._tensors: dict[str, Tensor] = {}
        self._num_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor, which is kept until its file is full."""
        if self._tensors and self._num_bytes + tensor.nbytes > self._shard_bytes:
            self._write()
        self._tensors[name] = tensor.contiguous()
        self._num_bytes += tensor.nbytes

    def finish(self, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
        """Write the remaining tensors, the index, the configuration, and copies of the checkpoint's other files."""
        self._write()
        count = len(self._shards)
        if count == 1:
            self._shard(0).rename(self._folder / SINGLE_FILE)
        else:
            places: dict[str, str] = {}
            for idx, names in enumerate(self._shards):
                final = f"model-{idx + 1:05}-of-{count:05}.safetensors"
                self._shard(idx).rename(self._folder / final)
                places |= dict.fromkeys(names, final)
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": places}
            _write_json(self._folder / INDEX_FILE, index)
        _write_json(self._folder / CONFIG_FILE, config)
        for path in _files(checkpoint.folder, COPIED):
            if path.name not in (CONFIG_FILE, INDEX_FILE):
                shutil.copyfile(path, self._folder / path.name)

    def _write(self) -> None:
        path = self._shard(len(self._shards))
        serialize_file({name: _spec(tensor) for name, tensor in self._tensors.items()}, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library creates files that only their owner can read
        self._shards.append(list(self._tensors))
        self._total_bytes += self._num_bytes
        self._tensors, self._num_bytes = {}, 0

    def _shard(self, idx: int) -> Path:
        return self._folder / f"{idx}.safetensors"


def _spec(tensor: Tensor) -> TensorSpec:
    """Return the library's description of a contiguous tensor; `save_file`, which creates it too, needs numpy."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(dtype=dtype, shape=tensor.shape, data_ptr=tensor.data_ptr(), data_len=tensor.nbytes)


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
