"""Quantisation of a checkpoint of 16 or 32 bits to a new checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from quire.cli.quantization.calibration import Calibration
from quire.cli.quantization.calibration_text import read_sequences
from quire.cli.quantization.compressed_tensors import FolderWriter, pack, quantization_config
from quire.cli.quantization.gguf_file import FORMS, write_gguf
from quire.cli.quantization.linear_layers import check_groups, linear_weights
from quire.cli.quantization.output import new_output
from quire.cli.quantization.rounding import QuantizedMatrix, Scheme, round_to_nearest
from quire.cli.quantization.source import PlainTensors
from quire.errors import ConfigError, UnsupportedModel, shown
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.columns import stored_by_columns
from quire.models.families import build
from quire.models.families.quantization_config import FIELDS
from quire.models.loading.sizes import check_sizes
from quire.models.loading.weights import choose_dtype
from quire.models.specs.spec import ModelSpec, WeightMap
from quire.models.tensors.dtypes import DTYPES

Method = Literal["calibrated", "rounded"]
INTEGERS: Final = {"int4": 4, "int8": 8}
# Called with the number of tensor values that are written, and the total number.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The form of the output, and the method of quantisation.

    Args:
        to: "int4" or "int8" for a folder in compressed-tensors format, or a type of GGUF files.
        method: "calibrated" finds the int4 codes that change outputs least on a text, "rounded" takes the nearest ones.
        group_size: number of inputs that share a scale, for int4.
        symmetric: False for zero points, for int4.
        dtype: dtype of unquantised tensors and of scales: "auto" for the checkpoint's dtype, or a dtype.
        calibration: file of the calibration text, each line a document; None for the bundled text.
        calibration_tokens: maximum number of tokens of the text that are used.
    """

    to: str
    method: Method = "calibrated"
    group_size: int = 32
    symmetric: bool = True
    dtype: str = "auto"
    calibration: Path | None = None
    calibration_tokens: int = 32768


def quantize(
    model: str, out: Path, options: QuantizeOptions, revision: str | None = None, progress: Progress | None = None
) -> None:
    """Quantise a checkpoint, and write the result."""
    checkpoint = Checkpoint.open(model, revision)
    if checkpoint.gguf_fields is not None or any(checkpoint.config.get(name) for name in FIELDS):
        raise ConfigError(f"model {model!r} is stored as GGUF or quantised already; name the original", field="model")
    if stored_by_columns(checkpoint):
        raise UnsupportedModel(
            f"{shown(checkpoint.config['architectures'][0])} has matrices that are stored by columns, which are not "
            "written quantised; --quantization quantises them when the model is loaded",
            field="architectures",
        )
    spec, weight_map = build(checkpoint.config)
    check_sizes(spec, checkpoint.tensors)
    report = progress or (lambda _done, _all: None)
    if options.to in FORMS:
        write_gguf(checkpoint, spec, weight_map, out, options.to, report)
    else:
        _FolderJob(checkpoint, spec, weight_map, options, report).write(out)


class _FolderJob:
    """Writes a folder in compressed-tensors format."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        weight_map: WeightMap,
        options: QuantizeOptions,
        progress: Progress,
    ) -> None:
        self._checkpoint, self._spec, self._weight_map = checkpoint, spec, weight_map
        self._progress = progress
        self._source = PlainTensors(checkpoint)
        self._dtype = choose_dtype(options.dtype, checkpoint)
        bits = INTEGERS[options.to]
        group_size = options.group_size if bits == 4 else None
        self._scheme = Scheme(bits, group_size, options.symmetric or bits == 8, self._dtype)
        self._weights = linear_weights(weight_map, checkpoint.tensors)
        self._names = [source for sources in self._weights.values() for source in sources]
        check_groups(checkpoint.tensors, self._names, group_size)
        self._sequences: list[list[int]] = []
        if bits == 4 and options.method == "calibrated":
            self._sequences = read_sequences(
                checkpoint.folder, options.calibration, options.calibration_tokens, spec.max_position
            )

    def write(self, out: Path) -> None:
        """Write the folder."""
        tensors, quantized = self._checkpoint.tensors, frozenset(self._names)
        sizes = {name: prod(tensor.shape) for name, tensor in tensors.items()}
        done, total = 0, sum(sizes.values())
        num_quantized = sum(sizes[name] for name in quantized)
        # Scales and zero points of groups take less than 2 bits per value.
        needed = num_quantized * (self._scheme.bits + 2) // 8 + (total - num_quantized) * self._dtype.itemsize
        with new_output(out, needed) as folder:
            writer = FolderWriter(folder)
            for name, stored in self._stored_tensors():
                for suffix, tensor in stored.items():
                    writer.add(name.removesuffix(".weight") + suffix if name in quantized else name, tensor)
                done += sizes[name]
                self._progress(done, total)
            writer.finish(self._checkpoint, self._config(quantized))

    def _stored_tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """Yield the name of each tensor of the checkpoint, and its parts by suffix: "" for an unquantised tensor."""
        for name, matrix in self._calibrated() if self._sequences else self._rounded():
            yield name, pack(matrix, self._scheme)
        quantized = frozenset(self._names)
        for name in self._checkpoint.tensors:
            if name not in quantized:
                yield name, {"": self._source.read(name, self._dtype)}

    def _rounded(self) -> Iterator[tuple[str, QuantizedMatrix]]:
        for name in self._names:
            yield name, round_to_nearest(self._source.read(name, torch.float32), self._scheme)

    def _calibrated(self) -> Iterator[tuple[str, QuantizedMatrix]]:
        calibration = Calibration(self._spec, self._weight_map, self._source.reader, self._sequences)
        for idx in range(len(self._spec.layers)):
            yield from calibration.quantize_layer(idx, self._weights, self._scheme)

    def _config(self, quantized: frozenset[str]) -> Mapping[str, Any]:
        tensors = self._checkpoint.tensors
        plain = [
            name.removesuffix(".weight")
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and name.endswith(".weight") and name not in quantized
        ]
        embedding = {name.removesuffix(".weight") for name in self._weight_map["embedding.weight"]}
        layers = [name for name in plain if name not in embedding and name != "lm_head"]
        name = "dtype" if "dtype" in self._checkpoint.config else "torch_dtype"
        dtype = next(key for key, value in DTYPES.items() if value == self._dtype)
        return {
            **self._checkpoint.config,
            name: dtype,
            "quantization_config": quantization_config(self._scheme, layers),
        }
