"""Layers of GPTQ have the values of their definition, in both formats of zero points and any order of inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.models.stored_quantization.packers import (
    Files,
    check_values,
    pack_columns,
    pack_rows,
    random_codes,
    random_scales,
    values,
    words_of,
)

N, K = 24, 192


def config(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False} | changes


def layer(bits: int, size: int, zeros: np.ndarray | None = None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a layer, and its scales [N, groups]; zeros are [N, groups], as they are stored."""
    num_groups = -(-K // size)
    scales = random_scales(N, num_groups)
    zeros = random_codes(N, num_groups, bits) if zeros is None else zeros
    tensors = {
        ".qweight": pack_columns(random_codes(N, K, bits).T, bits),
        ".qzeros": pack_rows(zeros.T, bits),
        ".scales": scales.t().contiguous(),
    }
    return tensors, scales


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_symmetric_layers_have_the_zero_point_in_the_middle(bits: int, group_size: int) -> None:
    size = K if group_size < 0 else group_size
    tensors, scales = layer(bits, size)
    found = Files().add("a", tensors).weight(config(bits=bits, group_size=group_size))
    groups = [col // size for col in range(K)]
    check_values(found, values(random_codes(N, K, bits), 1 << (bits - 1), scales, groups))
    assert not found.weight.form.has_zero_points


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2"])
def test_asymmetric_layers(bits: int, checkpoint_format: str) -> None:
    zeros = random_codes(N, K // 64, bits, seed=2)
    zeros[0] = 0
    tensors, scales = layer(bits, 64, zeros)
    if checkpoint_format == "gptq":
        # One less in each code of a word, with the borrow that a code of 0 makes.
        ones = sum(1 << place for place in range(0, 32, bits))
        stored = tensors[".qzeros"].numpy().view(np.uint32)
        tensors[".qzeros"] = words_of([[(int(word) - ones) % 2**32 for word in row] for row in stored])
    quantization = config(bits=bits, group_size=64, sym=False, checkpoint_format=checkpoint_format)
    found = Files().add("a", tensors).weight(quantization)
    check_values(found, values(random_codes(N, K, bits), zeros, scales, [col // 64 for col in range(K)]))


def test_zero_points_count_where_nothing_says_symmetric() -> None:
    zeros = random_codes(N, K // 64, seed=2)
    tensors, scales = layer(4, 64, zeros)
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 64, "format": "gptq_v2"}
    found = Files().add("a", tensors).weight(quantization)
    check_values(found, values(random_codes(N, K), zeros, scales, [col // 64 for col in range(K)]))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("size", [32, 128])
def test_inputs_of_a_group_become_adjacent(bits: int, sym: bool, size: int) -> None:
    groups = np.random.default_rng(0).permutation(np.arange(K) // size)
    zeros = random_codes(N, -(-K // size), bits, seed=2)
    tensors, scales = layer(bits, size, zeros)
    tensors[".g_idx"] = torch.from_numpy(groups).to(torch.int32)
    quantization = config(bits=bits, group_size=size, sym=sym, desc_act=True, checkpoint_format="gptq_v2")
    found = Files().add("a", tensors).weight(quantization)
    assert found.input_order is not None
    check_values(found, values(random_codes(N, K, bits), 1 << (bits - 1) if sym else zeros, scales, groups.tolist()))


def test_groups_in_order_need_no_order_of_inputs() -> None:
    tensors, scales = layer(4, 32)
    tensors[".g_idx"] = torch.arange(K, dtype=torch.int32) // 32
    found = Files().add("a", tensors).weight(config(desc_act=True))
    assert found.input_order is None
    check_values(found, values(random_codes(N, K), 8, scales, [col // 32 for col in range(K)]))


def test_rules_change_the_scheme_of_layers() -> None:
    rules: dict[str, Any] = {
        r"+:.*\.down": {"bits": 8, "group_size": 64},
        r".*\.0\..*": {"group_size": -1},
        r"-:.*\.gate": {},
    }
    files = Files().add("m.1.gate", {".weight": torch.ones(4, 4)})
    wanted = {"m.0.down": (8, 64), "m.0.up": (4, K), "m.1.up": (4, 32)}
    for name, (bits, size) in wanted.items():
        files.add(name, layer(bits, size)[0])
    for name, (bits, size) in wanted.items():
        scales = files.tensors[f"{name}.scales"].t()
        groups = [col // size for col in range(K)]
        check_values(
            files.weight(config(dynamic=rules), name),
            values(random_codes(N, K, bits), 1 << (bits - 1), scales, groups),
        )
