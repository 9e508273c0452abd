"""Linear layers and experts of transformers' modules on packed weights give what the modules give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from quire.models.hosted.experts import HostedExperts
from quire.models.hosted.linear import HostedLinear, LayerUse, watch_layers
from quire.ops import make_ops
from tests.hosted.filled import CASES, CPU, filled, load, save

IDS = torch.tensor([[3, 5, 7, 90, 11, 6, 8, 41, 2]])


@torch.inference_mode()
def logits(module: Any) -> torch.Tensor:
    """Return a module's logits [T, V] of `IDS`, without a cache."""
    result: torch.Tensor = module(input_ids=IDS, use_cache=False).logits[0]
    return result


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("model_type", CASES)
def test_logits_are_those_of_transformers(model_type: str, kernels: str, tmp_path: Path) -> None:
    wanted = logits(load(save(model_type, tmp_path), tmp_path))
    ours = filled(tmp_path, make_ops(CPU, kernels))
    torch.testing.assert_close(logits(ours), wanted, rtol=1e-4, atol=1e-4 * wanted.std().item())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_are_quantised_like_those_of_families(quantization: Any, tmp_path: Path) -> None:
    """The head keeps six bits at least, narrow layers eight, and logits of rounded inputs are float32."""
    save("olmo2", tmp_path, torch.bfloat16)
    given: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    class Recording:
        def __init__(self) -> None:
            self.ops = make_ops(CPU, "auto", quantization)

        def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> Any:
            given.append((tuple(weight.shape), options))
            return self.ops.pack_linear(weight, bias, **options)

    ours = filled(tmp_path, Recording(), torch.bfloat16)
    assert dict(given)[(97, 32)] == {"min_bits": 6}
    assert dict(given)[(48, 32)] == {"min_bits": 8}
    assert ours.lm_head(torch.ones(1, 2, 32, dtype=torch.bfloat16)).dtype == torch.float32
    assert ours.model.layers[0].mlp.up_proj(torch.ones(1, 2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


class Reader(nn.Module):
    """A module that uses its layers in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.plain, self.twice, self.part = (
            nn.Embedding(9, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            Conv1D(4, 4),
        )
        self.read, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.table(ids))
        x = self.twice(self.twice(x)) + self.part(x[:, :2]).sum()
        result: torch.Tensor = self.read(x.to(self.read.weight.dtype))
        return result


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_use_of_layers_is_recorded(device: str) -> None:
    module = Reader().to(device)
    with watch_layers(module, 3) as watched, torch.no_grad():
        module(torch.tensor([[1, 2, 3]], device=device))
    assert watched.use == LayerUse(frozenset({"read"}), frozenset({"plain", "twice", "read"}))
    assert type(module.plain) is nn.Linear
    assert type(module.part) is Conv1D


def test_layers_whose_weights_are_read_stay(tmp_path: Path) -> None:
    save("olmo2", tmp_path)
    kept = frozenset({"model.layers.1.mlp.up_proj", "lm_head"})
    ours = filled(tmp_path, use=LayerUse(kept, frozenset()))
    stayed = {name for name, layer in ours.named_modules() if type(layer) is nn.Linear}
    assert stayed == kept
    assert ours.lm_head.weight.device == CPU


def test_rows_of_another_dtype_are_refused(tmp_path: Path) -> None:
    """Packed kernels would take their bits for values."""
    save("olmo2", tmp_path)
    layer = filled(tmp_path).model.layers[0].mlp.up_proj
    assert isinstance(layer, HostedLinear)
    with pytest.raises(TypeError, match=r"float32 got rows of torch\.bfloat16"):
        layer(torch.ones(1, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("model_type", ["minimax_m2", "gpt_oss"])
def test_experts_are_packed_and_give_what_the_loop_over_them_gives(model_type: str, tmp_path: Path) -> None:
    theirs = load(save(model_type, tmp_path), tmp_path)
    ours = filled(tmp_path, make_ops(CPU))
    mine, loop = ours.model.layers[0].mlp.experts, theirs.model.layers[0].mlp.experts
    packed: Any = mine._hosted_experts
    assert isinstance(packed, HostedExperts)
    assert not list(mine.parameters())
    torch.manual_seed(1)
    x, num_experts = torch.randn(17, 32), len(packed.projections["down_proj"].runs)
    chosen = torch.stack([torch.randperm(num_experts)[:2] for _ in x])
    scores = torch.rand(17, 2)
    with torch.inference_mode():
        wanted = loop(x, chosen, scores)
        torch.testing.assert_close(mine(x, chosen, scores), wanted, rtol=1e-4, atol=1e-4)
        # A row's result does not depend on the other rows.
        assert torch.equal(mine(x[4:6], chosen[4:6], scores[4:6]), mine(x, chosen, scores)[4:6])
        # An index after the last expert is none.
        none = torch.full((17, 1), num_experts)
        padded = mine(x, torch.cat([chosen, none], 1), torch.cat([scores, scores[:, :1]], 1))
        assert torch.equal(padded, mine(x, chosen, scores))


def test_gates_that_a_backend_has_are_its_own(tmp_path: Path) -> None:
    """The clamped gate of gpt-oss with rows in turn is the module's; SiLU is fused."""
    gated = []

    class Recording:
        def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> Any:
            gated.append(options.get("gate"))
            return make_ops(CPU).pack_linear(weight, bias, **options)

    for model_type, gates in (("minimax_m2", {None, "silu"}), ("gpt_oss", {None})):
        gated.clear()
        save(model_type, tmp_path / model_type)
        filled(tmp_path / model_type, Recording())
        assert set(gated) == gates
