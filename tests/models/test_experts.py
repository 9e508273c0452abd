"""The block of experts beside its slow twin, what it costs, and checkpoints as transformers writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.loading.loading import load_decoder
from quire.models.modules.experts import ExpertsBlock
from quire.models.modules.norms import Norm
from quire.models.modules.projections import ResidualAdd
from quire.models.specs.spec import Experts, GatedMLP, ModelSpec, RMSNorm
from quire.ops.interface.ops import Activation, Linear
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.pytorch.torch_ops import TorchOps
from tests.models.published import CONFIGS, rope_parameter
from tests.models.stored_tensors import stored_buffers
from tests.models.test_conformance import assert_same
from tests.models.tiny import CASES, SHAPE, PagedRun, random_tokens, reference_logits

WIDTH = 12
PLAIN = Experts(5, 2, 8)
CPU = torch.device("cpu")


class CountingOps(TorchOps):
    """The torch backend, with a list of the rows of every product."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.rows: list[int] = []

    def pack_linear(
        self,
        weight: torch.Tensor | StoredWeight,
        bias: torch.Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,  # noqa: ARG002 (nothing is rounded)
    ) -> Linear:
        linear = super().pack_linear(weight, bias, min_bits, gate)
        if gate is not None:
            return linear  # its product is counted

        def run(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
            self.rows.append(len(x))
            return linear(x, residual)

        return run


def new_norm(norm: RMSNorm) -> Norm:
    return Norm(norm, WIDTH, TorchOps(CPU), torch.float32, CPU)


def filled(experts: Experts, ops: TorchOps) -> tuple[ExpertsBlock, dict[str, torch.Tensor]]:
    """Return a block with random weights, and these."""
    block = ExpertsBlock(experts, WIDTH, ResidualAdd(), ops, new_norm)
    generator = torch.Generator().manual_seed(4)
    weights = {name: torch.randn(slot.shape, generator=generator) for name, slot in block.slots.items()}
    for name, slot in block.slots.items():
        slot.fill(weights[name])
    return block, weights


def gated(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, biases: Sequence[Any] = (0.0, 0.0), step: int = 1
) -> torch.Tensor:
    """Return what a gated MLP makes of a row; with a step of 2, gates and ups alternate."""
    product = gate_up @ x + biases[0]
    gate, up = product.chunk(2) if step == 1 else (product[::2], product[1::2])
    result: torch.Tensor = down @ (functional.silu(gate) * up) + biases[1]
    return result


def expected_row(x: torch.Tensor, experts: Experts, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the experts make of a row: all scores, the best of them, one expert after the other."""
    weights = {name: weight.double() for name, weight in weights.items()}
    x = x.double()
    routed = x
    if experts.router_norm is not None:
        routed = x / (x.square().mean() + experts.router_norm.eps).sqrt() * weights["router_norm.weight"]
    logits = (weights["router.weight"] @ routed + weights.get("router.bias", 0.0)) * experts.logit_scale
    scores = logits.softmax(0) if experts.scoring == "softmax" else logits.sigmoid()
    judged = scores + weights.get("choice_bias.weight", 0.0)
    best = sorted(range(experts.num_experts), key=lambda idx: -judged[idx])[: experts.num_chosen]
    total = sum(scores[idx] for idx in best) + experts.sum_eps if experts.renormalised else 1.0
    scores = scores * experts.score_scale * weights.get("expert_scales.weight", 1.0)
    result = torch.zeros(WIDTH, dtype=torch.float64)
    for idx in best:
        parts = []
        for name in ("gate_up.weight", "down.weight"):
            stored = weights[name]
            parts.append(stored[idx].T if experts.transposed else stored.chunk(experts.num_experts)[idx])
        biases: list[Any] = [0.0, 0.0]
        if experts.bias:
            biases = [weights[f"{name}.bias"].chunk(experts.num_experts)[idx] for name in ("gate_up", "down")]
        score, gate_up, down = scores[idx] / total, *parts
        given = gated(score * x if experts.scaled_input else x, gate_up, down, biases, 1 + experts.interleaved)
        result += given if experts.scaled_input else score * given
    if experts.shared_width:
        gate = (weights["shared.gate.weight"] @ x).sigmoid() if experts.shared_gate else 1.0
        result += gate * gated(x, weights["shared.gate_up.weight"], weights["shared.down.weight"])
    return result


def assert_as_expected(experts: Experts) -> None:
    """Compare a block with random weights with its slow twin, row by row."""
    block, weights = filled(experts, TorchOps(CPU))
    x, residual = torch.randn(2, 17, WIDTH, generator=torch.Generator().manual_seed(6))
    kept = residual.clone()
    with torch.inference_mode():
        found = block(x, residual)
    assert torch.equal(residual, kept)
    expected = torch.stack([expected_row(row, experts, weights) for row in x]) + residual
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shared_width", [0, 6])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scaled_input", [False, True])
@pytest.mark.parametrize("renormalised", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_experts_are_chosen_and_scored(
    scoring: Any, renormalised: bool, scaled_input: bool, transposed: bool, shared_width: int
) -> None:
    experts = Experts(5, 2, 8, scoring, renormalised, scaled_input, shared_width, transposed=transposed)
    assert_as_expected(experts)


@pytest.mark.parametrize(
    "options",
    [
        {"shared_width": 6, "shared_gate": True},
        {"choice_bias": True},
        {"choice_bias": True, "scoring": "sigmoid", "renormalised": True, "sum_eps": 0.3, "score_scale": 1.7},
        {"expert_scales": True, "renormalised": True},
        {"router_norm": RMSNorm(1e-3, wide=True), "logit_scale": WIDTH**-0.5},
        {"bias": True, "renormalised": True},
        {"bias": True, "interleaved": True, "transposed": True},
        {"interleaved": True},
    ],
)
def test_options_of_a_router(options: dict[str, Any]) -> None:
    assert_as_expected(Experts(5, 2, 8, **options))


def test_an_expert_that_nobody_goes_through_costs_nothing() -> None:
    ops = CountingOps()
    block, weights = filled(PLAIN, ops)
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        block(x[:1], x[:1])
        # The router, and two products for each of two experts.
        assert ops.rows == [1] * 5
        ops.rows.clear()
        block(x, x)
    counts = (x @ weights["router.weight"].T).topk(2).indices.flatten().bincount(minlength=5).tolist()
    assert ops.rows == [6, *(count for count in counts if count for _ in range(2))]


def test_what_experts_give_is_added_in_float32() -> None:
    """Eight times 0.75 to 256, where bfloat16 knows nothing below 2."""
    block = ExpertsBlock(Experts(8, 8, 1, "sigmoid"), WIDTH, ResidualAdd(), TorchOps(CPU), new_norm)
    weights = {name: torch.zeros(slot.shape, dtype=torch.bfloat16) for name, slot in block.slots.items()}
    weights["gate_up.weight"][0::2, 0], weights["gate_up.weight"][1::2, 0] = 16.0, 1.5 / 16.0
    weights["down.weight"].fill_(1.0)
    for name, slot in block.slots.items():
        slot.fill(weights[name])
    with torch.inference_mode():
        found = block(torch.ones(3, WIDTH, dtype=torch.bfloat16), torch.full((3, WIDTH), 256.0, dtype=torch.bfloat16))
    assert torch.equal(found, torch.full((3, WIDTH), 262.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "llama4", "qwen3.5-moe", "lfm2-moe", "gemma4-moe"])
def test_checkpoints_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """Each expert by itself, or all in one tensor, as transformers writes them."""
    config_class, model_class, changes = CASES[name]
    torch.manual_seed(5)
    reference = model_class(config_class(**SHAPE | changes | {"initializer_range": 0.2})).eval()
    reference.save_pretrained(tmp_path)
    decoder = load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
    token_ids = random_tokens(30)
    run = PagedRun(decoder)
    found = torch.cat([run.step({0: token_ids[:19]})[0], run.step({0: token_ids[19:]})[0]])
    assert_same(found, reference_logits(reference, token_ids))


@pytest.mark.parametrize("name", ["qwen3.5-moe", "lfm2-moe", "gemma4-moe"])
def test_checkpoints_with_stacked_experts(name: str, tmp_path: Path) -> None:
    """Tensors under the names of the modules, as published: [X, out, in]."""
    config_class, model_class, changes = CASES[name]
    torch.manual_seed(5)
    reference = model_class(config_class(**SHAPE | changes | {"initializer_range": 0.2})).eval()
    reference.config.save_pretrained(tmp_path)
    save_file(dict(reference.named_parameters()) | stored_buffers(reference), tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(str(tmp_path))
    config = dict(checkpoint.config) | {"architectures": [model_class.__name__]}
    checkpoint = replace(checkpoint, config=config)
    decoder = load_decoder(checkpoint, device="cpu", dtype=torch.float32)
    token_ids = random_tokens(30)
    assert_same(PagedRun(decoder).step({0: token_ids})[0], reference_logits(reference, token_ids))


def read(name: str, **changes: Any) -> ModelSpec:
    config = CONFIGS[name]
    if "text_config" in config:
        return build(config | {"text_config": config["text_config"] | changes})[0]
    return build(config | changes)[0]


def test_what_configurations_say_of_experts() -> None:
    assert read("Mixtral 8x7B").layers[0].ffn == Experts(8, 2, 14336, renormalised=True)
    assert read("Qwen3 30B A3B").layers[47].ffn == Experts(128, 8, 768, renormalised=True)
    assert read("Qwen3 30B A3B", norm_topk_prob=False).layers[0].ffn == Experts(128, 8, 768)
    sparse = read("Qwen3 30B A3B", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [isinstance(layer.ffn, Experts) for layer in sparse.layers] == [False, True, False, False, False, True]
    shared = Experts(256, 8, 512, renormalised=True, shared_width=512, shared_gate=True)
    assert read("Qwen3.5 35B A3B").layers[0].ffn == shared
    lfm2 = read("LFM2 8B A1B")
    assert [isinstance(layer.ffn, GatedMLP) for layer in lfm2.layers[:3]] == [True, True, False]
    assert lfm2.layers[2].ffn == Experts(32, 4, 1792, "sigmoid", renormalised=True, choice_bias=True, sum_eps=1e-6)
    beside = read("Gemma 4 26B A4B").layers[29].ffn
    assert beside.mlp == GatedMLP(2112, activation="gelu_tanh")
    assert (beside.experts.num_experts, beside.experts.num_chosen, beside.experts.width) == (128, 8, 704)
    assert read("Mixtral 8x7B").layers[0].mixer.rope.theta == rope_parameter(transformers.MixtralConfig(), "rope_theta")


@pytest.mark.parametrize(
    ("name", "field", "changes"),
    [
        ("Qwen3 30B A3B", "use_sliding_window", {"use_sliding_window": True}),
        ("Qwen3 30B A3B", "hidden_act", {"hidden_act": "gelu"}),
        ("Mixtral 8x7B", "layer_types", {"layer_types": ["chunked_attention"] * 32}),
        ("Qwen3.5 35B A3B", "norm_topk_prob", {"norm_topk_prob": False}),
        ("Qwen3.5 35B A3B", "decoder_sparse_step", {"decoder_sparse_step": 2}),
        ("Qwen3.5 35B A3B", "mlp_only_layers", {"mlp_only_layers": [0]}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name: str, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(name, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "field", "changes"),
    [
        ("Mixtral 8x7B", "num_experts_per_tok", {"num_experts_per_tok": 9}),
        ("Mixtral 8x7B", "num_local_experts", {"num_local_experts": 0}),
        ("Qwen3 30B A3B", "num_experts_per_tok", {"num_experts": 4}),
        ("Qwen3 30B A3B", "mlp_only_layers", {"mlp_only_layers": [-1]}),
        ("LFM2 8B A1B", "num_dense_layers", {"num_dense_layers": 24}),
        ("LFM2 8B A1B", "use_expert_bias", {"use_expert_bias": 1}),
        ("LFM2 8B A1B", "num_experts_per_tok", {"num_experts_per_tok": 33}),
        ("Gemma 4 26B A4B", "top_k_experts", {"top_k_experts": None}),
        ("Gemma 4 26B A4B", "num_experts_per_tok", {"top_k_experts": 129}),
        ("Qwen3.5 35B A3B", "num_experts", {"num_experts": 0}),
        ("Qwen3.5 35B A3B", "shared_expert_intermediate_size", {"shared_expert_intermediate_size": "512"}),
    ],
)
def test_a_wrong_field_is_named(name: str, field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=field) as caught:
        read(name, **changes)
    assert caught.value.field == field
