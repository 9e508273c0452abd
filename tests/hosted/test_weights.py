"""Weights of transformers' modules: their state is what `from_pretrained` gives, or the checkpoint is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.errors import CheckpointError, QuireError
from quire.models.hosted.linear import HostedEmbedding, HostedLinear
from quire.ops.interface.quantized_weight import StoredWeight
from tests.hosted.filled import (
    CASES,
    KeepingOps,
    KeptLinear,
    filled,
    load,
    save,
    state_of,
    transposed_names,
)

FILE = "model.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", CASES)
def test_the_state_is_that_of_transformers(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = load(save(model_type, tmp_path, dtype), tmp_path, dtype)
    ours = filled(tmp_path, dtype=dtype)
    wanted, found = theirs.state_dict(), state_of(ours)
    assert found.keys() == wanted.keys()
    for name in transposed_names(theirs):
        found[name] = found[name].mT
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    buffers = dict(theirs.named_buffers())
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in ours.named_buffers())
    assert sum(isinstance(layer, HostedLinear) for layer in ours.modules()) > 4
    assert not any(type(layer) is torch.nn.Linear for layer in ours.modules())


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Edit the tensors of a checkpoint."""
    tensors = load_file(folder / FILE)
    edit(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / FILE)


def rename(tensors: dict[str, Tensor], before: str, after: str) -> None:
    for name in list(tensors):
        tensors[name.replace(before, after, 1)] = tensors.pop(name)


def test_names_without_the_prefix_of_the_base_model(tmp_path: Path) -> None:
    """Checkpoints of GPT-2 as published have none, and masks that modules do not store any more."""
    theirs = load(save("gpt2", tmp_path), tmp_path)
    change(tmp_path, lambda tensors: rename(tensors, "transformer.", ""))
    change(tmp_path, lambda tensors: tensors.update({"h.0.attn.bias": torch.ones(1, 1, 4, 4)}))
    found = state_of(filled(tmp_path))
    assert torch.equal(found["transformer.h.1.mlp.c_fc.weight"].mT, theirs.transformer.h[1].mlp.c_fc.weight)


def test_a_tied_head_shares_the_packed_weight(tmp_path: Path) -> None:
    save("gpt2", tmp_path)
    ours = filled(tmp_path)
    embedding = ours.transformer.wte
    assert isinstance(embedding, HostedEmbedding)
    assert embedding._look_up.__self__ is ours.lm_head._projection.run  # type: ignore[attr-defined]
    ids = torch.tensor([[3, 5], [7, 96]])
    assert torch.equal(embedding(ids), state_of(ours)["lm_head.weight"][ids])


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_head_may_be_stored_too(is_equal: bool, tmp_path: Path) -> None:
    """Transformers does not tie weights whose stored values differ."""
    save("gpt2", tmp_path)
    change(
        tmp_path,
        lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] * (1 if is_equal else 2)}),
    )
    theirs, ours = load(save("gpt2", tmp_path / "other"), tmp_path), filled(tmp_path)
    assert isinstance(ours.transformer.wte, HostedEmbedding) == is_equal
    assert torch.equal(state_of(ours)["lm_head.weight"], theirs.lm_head.weight)
    assert torch.equal(state_of(ours)["transformer.wte.weight"], theirs.transformer.wte.weight)


def test_a_head_stands_for_a_missing_embedding(tmp_path: Path) -> None:
    theirs = save("gpt2", tmp_path)
    change(tmp_path, lambda tensors: rename(tensors, "transformer.wte.weight", "lm_head.weight"))
    assert torch.equal(state_of(filled(tmp_path))["transformer.wte.weight"], theirs.lm_head.weight)


def test_computed_buffers_need_not_be_stored(tmp_path: Path) -> None:
    """The choice bias of experts is a buffer of zeros until it is trained."""
    save("deepseek_v3", tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    change(tmp_path, lambda tensors: tensors.pop(name))
    assert not state_of(filled(tmp_path))[name].any()


def pop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], object], str]] = {
    "missing": ("olmo2", pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
    "tied and missing": ("gpt2", pop("transformer.wte.weight"), "transformer.wte.weight"),
    "shape": ("olmo2", put("model.norm.weight", torch.ones(31)), "31.*model.norm.weight"),
    "transposed": ("olmo2", put("lm_head.weight", torch.ones(32, 97)), "32, 97.*lm_head.weight"),
    "surplus": ("olmo2", put("model.layers.2.mlp.up_proj.weight", torch.ones(3)), "model.layers.2.mlp.up_proj"),
    "dtype": ("olmo2", put("model.norm.weight", torch.ones(32, dtype=torch.int64)), "model.norm.weight.*I64"),
    "infinite": ("olmo2", put("model.norm.weight", torch.full((32,), torch.inf)), "model.norm.weight"),
    "expert missing": ("deepseek_v3", pop(GATE), "differ in dimension|mlp.experts"),
    "expert of another shape": ("deepseek_v3", put(GATE, torch.ones(15, 32)), "one shape"),
    "two of one name": (
        "minimax_m2",
        lambda tensors: tensors.update(
            {"model.layers.0.mlp.gate.weight": tensors["model.layers.0.block_sparse_moe.gate.weight"]}
        ),
        "two tensors.*gate.weight",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints_are_refused_by_name(damage: str, tmp_path: Path) -> None:
    model_type, edit, message = DAMAGES[damage]
    save(model_type, tmp_path)
    change(tmp_path, edit)
    with pytest.raises(CheckpointError, match=message):
        filled(tmp_path)


def test_nothing_is_read_or_packed_before_names_and_shapes_are_checked(tmp_path: Path) -> None:
    save("olmo2", tmp_path)
    change(tmp_path, put("model.norm.weight", torch.ones(31)))

    class NoOps:
        name = "none"

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    with pytest.raises(QuireError):
        filled(tmp_path, ops=NoOps())


def test_stored_float8_weights_stay_quantised(tmp_path: Path) -> None:
    """Layers are packed from their codes; experts by themselves become slices of a stack, all of them codes, too."""
    save("deepseek_v3", tmp_path)
    plain: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name, tensor in list(tensors.items()):
            if name.endswith("proj.weight") and tensor.shape[1] % 16 == 0:
                scales = tensor.abs().amax(1, keepdim=True) / 448
                codes = (tensor / scales).to(torch.float8_e4m3fn)
                tensors[name], tensors[f"{name}_scale_inv"] = codes, scales
                plain[name] = codes.float() * scales

    change(tmp_path, quantise)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    packed: list[Any] = []
    ours = filled(tmp_path, ops=Recording(packed))
    found = state_of(ours)
    name = "model.layers.0.self_attn.o_proj.weight"
    torch.testing.assert_close(found[name], plain[name], rtol=0, atol=1e-6)
    gates = torch.stack(
        [
            torch.cat([plain[f"model.layers.1.mlp.experts.{idx}.{part}_proj.weight"] for part in ("gate", "up")])
            for idx in range(6)
        ]
    )
    torch.testing.assert_close(found["model.layers.1.mlp.experts.gate_up_proj"], gates, rtol=0, atol=1e-6)
    assert sum(isinstance(weight, StoredWeight) for weight in packed) >= len(plain) - 6


class Recording(KeepingOps):
    """Kernels that record what they are given."""

    def __init__(self, packed: list[Any]) -> None:
        self._packed = packed

    def pack_linear(self, weight: Tensor | StoredWeight, bias: Tensor | None = None, **options: Any) -> KeptLinear:
        self._packed.append(weight)
        return super().pack_linear(weight, bias, **options)
