"""gpt-oss: published configurations, experts in blocks of MXFP4, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.cli.main import main
from quire.errors import CheckpointError, ConfigError, UnsupportedModel
from quire.measurement.bench.exact_ops import ExactOps
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.families.expert_layout import BLOCK_EXPERTS
from quire.models.families.quantization_config import without_quantization
from quire.models.loading.inspection import inspect
from quire.models.loading.loading import load_decoder
from quire.models.loading.weights import load_weights
from quire.models.modules.decoder import Decoder
from quire.models.specs.rotations import YarnScaling
from quire.models.specs.spec import Attention, Experts, ModelSpec
from tests.models.gguf.test_models import CPU
from tests.models.gguf.writer import write_gguf
from tests.models.published import CONFIGS
from tests.models.stored_quantization.packers import fp4_values, pack_fp4, random_codes
from tests.models.test_conformance import assert_same
from tests.models.tiny import CASES, SHAPE, PagedRun, random_tokens, reference_logits

GPT_OSS = CONFIGS["gpt-oss 20B"]
NUM_LAYERS, NUM_EXPERTS, WIDTH, INNER = 2, 5, 64, 96


def read(**changes: Any) -> ModelSpec:
    return build(without_quantization(GPT_OSS | changes))[0]


def test_published_configuration() -> None:
    spec = read()
    assert [layer.mixer.window for layer in spec.layers[:3] if isinstance(layer.mixer, Attention)] == [128, None, 128]
    attention, experts = spec.layers[0].mixer, spec.layers[0].ffn
    assert isinstance(attention, Attention)
    assert isinstance(experts, Experts)
    assert attention.sinks
    assert attention.qkv_bias
    assert attention.output_bias
    assert attention.rope is not None
    assert isinstance(attention.rope.scaling, YarnScaling)
    assert not attention.rope.scaling.truncate
    assert attention.rope.theta == 150000
    assert (experts.num_experts, experts.num_chosen, experts.width) == (32, 4, 2880)
    assert experts.transposed
    assert not read(**{BLOCK_EXPERTS: True}).layers[0].ffn.transposed
    # What a configuration leaves out is what transformers takes for it.
    left_out = dict.fromkeys(("rope_scaling", "rope_theta", "layer_types", "sliding_window", "head_dim"))
    assert read(**left_out) == spec


@pytest.mark.parametrize(
    ("error", "field", "changes"),
    [
        (UnsupportedModel, "swiglu_limit", {"swiglu_limit": 5.0}),
        (UnsupportedModel, "swiglu_alpha", {"swiglu_alpha": 1.0}),
        (UnsupportedModel, "hidden_act", {"hidden_act": "gelu"}),
        (UnsupportedModel, "layer_types", {"layer_types": ["chunked_attention"] * 24}),
        (UnsupportedModel, "rope_type", {"rope_scaling": {"rope_type": "longrope"}}),
        (CheckpointError, "layer_types", {"layer_types": ["full_attention"]}),
        (CheckpointError, "num_experts_per_tok", {"num_experts_per_tok": 33}),
        (CheckpointError, "sliding_window", {"sliding_window": 0}),
    ],
)
def test_what_is_not_served_is_refused(error: type[Exception], field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=field) as caught:
        read(**changes)
    assert getattr(caught.value, "field", None) == field


class Written:
    """A checkpoint whose experts have values of MXFP4, plain in one folder and in blocks in the other."""

    def __init__(self, folder: Path) -> None:
        config_class, model_class, changes = CASES["gpt-oss"]
        torch.manual_seed(5)
        self.model = model_class(config_class(**SHAPE | changes | {"initializer_range": 0.2})).eval()
        blocks: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name.endswith(("_bias", "sinks")):
                    parameter.normal_()
                elif ".experts." in name:
                    blocks |= self._fill_experts(name, parameter)
        self.plain, self.in_blocks = folder / "plain", folder / "blocks"
        for each in (self.plain, self.in_blocks):
            self.model.save_pretrained(each)
        tensors = load_file(self.in_blocks / "model.safetensors")
        stacks = {name.removesuffix("_blocks").removesuffix("_scales") for name in blocks}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in stacks}
        save_file(tensors | blocks, self.in_blocks / "model.safetensors")
        path = self.in_blocks / "config.json"
        config = json.loads(path.read_text()) | {"quantization_config": GPT_OSS["quantization_config"]}
        path.write_text(json.dumps(config))

    @staticmethod
    def _fill_experts(name: str, parameter: Tensor) -> dict[str, Tensor]:
        """Fill experts [X, in, out] with values of MXFP4; return these in blocks, as rows of [X, out, in]."""
        num_experts, width, num_rows = parameter.shape
        codes = random_codes(num_experts * num_rows, width, seed=len(name))
        exponents = random_codes(num_experts * num_rows, width // 32, 2, seed=num_rows) + 122
        parameter.copy_(fp4_values(codes, exponents).view(num_experts, num_rows, width).mT)
        scales = torch.from_numpy(exponents).to(torch.uint8).view(num_experts, num_rows, -1)
        return {f"{name}_blocks": pack_fp4(codes).view(*scales.shape, 16), f"{name}_scales": scales}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("gpt-oss"))


def logits_of(path: Path) -> Tensor:
    """Return the logits of a checkpoint by exact products with its values."""
    checkpoint = Checkpoint.open(str(path))
    spec, weight_map = build(without_quantization(checkpoint.config))
    decoder = Decoder(spec, ops=ExactOps(), dtype=torch.float32, device=CPU)
    load_weights(checkpoint, weight_map, decoder)
    with torch.inference_mode():
        return PagedRun(decoder).step({0: random_tokens(30)})[0]


def test_experts_in_blocks_have_the_values_of_the_plain_ones(written: Written, tmp_path: Path) -> None:
    expected = reference_logits(written.model, random_tokens(30))
    assert_same(logits_of(written.plain), expected)
    assert_same(logits_of(written.in_blocks), expected)
    path = write_gguf(
        written.plain, tmp_path / "model.gguf", lambda name, _: Type.MXFP4 if "_exps" in name else Type.F32
    )
    assert_same(logits_of(path), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_of_experts_in_blocks_are_near(written: Written, dtype: torch.dtype) -> None:
    """Rows rounded to int8 move logits by a few percent of their spread."""
    decoder = load_decoder(Checkpoint.open(str(written.in_blocks)), device="cpu", dtype=dtype)
    tokens = random_tokens(30)
    expected = reference_logits(written.model, tokens)
    found = PagedRun(decoder).step({0: tokens})[0]
    assert (found - expected).std() < 0.2 * expected.std()


def test_inspection(written: Written) -> None:
    plain, in_blocks = (inspect(Checkpoint.open(str(each))) for each in (written.plain, written.in_blocks))
    assert in_blocks.format == "safetensors, MXFP4"
    assert in_blocks.problem == ""
    assert (in_blocks.num_layers, in_blocks.width, in_blocks.vocab_size) == (NUM_LAYERS, WIDTH, 211)
    num_values = NUM_LAYERS * NUM_EXPERTS * 3 * WIDTH * INNER
    assert plain.num_bytes - in_blocks.num_bytes == num_values * 4 - num_values * 17 // 32


def test_a_plan_takes_experts_as_they_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """13.8 GB of weights, where all of them in bfloat16 would not fit."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    assert main(["plan", str(tmp_path / "config.json"), "--memory=24GiB", "--json"]) == 0
    weights_bytes = json.loads(capsys.readouterr().out)["weights_bytes"]
    num_experts = 24 * 32 * 3 * 2880**2
    assert num_experts * 9 // 16 < weights_bytes < 14.5e9
    assert 2 * num_experts > 24 << 30


def test_a_stack_of_another_shape_is_refused(written: Written, tmp_path: Path) -> None:
    for name in ("gate_up_proj_bias", "down_proj_blocks"):
        tensors = load_file(written.in_blocks / "model.safetensors")
        full = f"model.layers.1.mlp.experts.{name}"
        tensors[full] = tensors[full][:-1].clone()
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((written.in_blocks / "config.json").read_text())
        with pytest.raises(ConfigError, match=name.removesuffix("_blocks")):
            load_decoder(Checkpoint.open(str(tmp_path)), device="cpu", dtype=torch.float32)
