"""Layers are read from mapped files as from memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.tensor_reader import MappedFile
from quire.models.stored_quantization import TORCH_DTYPES, read_quantization
from tests.models.stored_quantization.packers import (
    check_values,
    fp4_values,
    pack_fp4,
    pack_rows,
    random_codes,
    random_scales,
    values,
)
from tests.models.stored_quantization.test_float8 import float8_values, random_float8

N, K = 20, 64


def test_dtypes_of_files(tmp_path: Path) -> None:
    integers, exponents = random_codes(N, K, 8) - 128, random_codes(N, K // 32, 7)
    scales = {dtype: random_scales(N, K // 32, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32)}
    half, brain, single = scales.values()
    tensors = {
        "packed.weight_packed": pack_rows(random_codes(N, K), 4),
        "packed.weight_shape": torch.tensor([N, K]),
        "packed.weight_scale": half,
        "integers.weight": torch.from_numpy(integers).to(torch.int8),
        "integers.weight_scale": brain,
        "zeros.weight": torch.from_numpy(integers).to(torch.int8),
        "zeros.weight_scale": single,
        "zeros.weight_zero_point": torch.zeros(N, K // 32, dtype=torch.int8),
        "octets.weight_packed": pack_fp4(random_codes(N, K)),
        "octets.weight_scale": torch.from_numpy(exponents).to(torch.uint8),
        "float8.weight": random_float8(N, K),
        "float8.weight_scale": torch.full((1, 1), 130, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "powers.weight_packed": pack_fp4(random_codes(N, K)),
        "powers.weight_scale": torch.from_numpy(exponents).to(torch.uint8).view(torch.float8_e8m0fnu),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = {"num_bits": 4, "group_size": 32}
    schemes = {
        "packed": {"targets": ["packed"], "format": "pack-quantized", "weights": weights},
        "integers": {"targets": ["integers"], "format": "int-quantized", "weights": weights | {"num_bits": 8}},
        "zeros": {"targets": ["zeros"], "format": "int-quantized", "weights": weights | {"symmetric": False}},
        "float8": {
            "targets": ["float8"],
            "format": "float-quantized",
            "weights": {"type": "float", "strategy": "tensor"},
        },
        "mx": {"targets": ["Linear"], "format": "mxfp4-pack-quantized", "weights": weights | {"type": "float"}},
    }
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": schemes}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}), encoding="utf-8")

    checkpoint = Checkpoint.open(str(tmp_path))
    found = read_quantization(checkpoint.config, checkpoint.tensors)
    assert found is not None
    file = MappedFile(next(iter(checkpoint.tensors.values())))

    def tensor(name: str) -> Tensor:
        stored = checkpoint.tensors[name]
        return file.tensor(stored, TORCH_DTYPES[stored.dtype])

    groups = [col // 32 for col in range(K)]
    check_values(found.weight("packed", tensor), values(random_codes(N, K), 8, half, groups))
    check_values(found.weight("integers", tensor), values(integers, 0, brain, groups))
    check_values(found.weight("zeros", tensor), values(integers, 0, single, groups))
    check_values(found.weight("float8", tensor), float8_values(random_float8(N, K), torch.tensor([[8.0]]), (N, K)))
    for layer in ("octets", "powers"):
        assert found.suffixes(layer) == (".weight_packed", ".weight_scale")
        check_values(found.weight(layer, tensor), fp4_values(random_codes(N, K), exponents))
