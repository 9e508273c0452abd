"""Fields and tensors that are refused, by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError, QuireError, UnsupportedModel
from quire.models.families import build
from quire.models.gguf.architectures import ARCHITECTURES, AxisSwap, TensorSource, read_architecture
from quire.models.gguf.architectures.metadata import shortest
from quire.models.specs.rotations import Sections
from quire.models.specs.spec import ImageRows
from tests.models.gguf.test_architectures import Written, write

WRONG: tuple[Any, ...] = (None, -1, 0, 3, 2**60, 1.5, float("nan"), float("inf"), True, "x", [], [1], [None] * 4, {})
NAMES: tuple[str, ...] = ("llama", "qwen3-moe", "qwen3.5", "qwen3.5-moe", "gemma3", "gemma4", "lfm2", "lfm2-moe")
NAMES += ("granite4", "falcon-h1", "phi3-longrope", "gpt-oss", "nemotron-h-moe")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def llama(folder: Path) -> Written:
    return write("llama", folder / "llama")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, ["'mamba'", *ARCHITECTURES]),
        ({"general.architecture": None}, ["general.architecture", "None"]),
        ({"general.type": "mmproj", "general.architecture": "clip"}, ["mmproj", "sees images"]),
        ({"general.architecture": "clip"}, ["clip", "sees images"]),
        ({"general.type": "adapter"}, ["adapter", "LoRA"]),
        ({"general.type": ["x"]}, ["general.type"]),
        ({"llama.attention.clamp_kqv": 8.0}, ["llama.attention.clamp_kqv", "8.0"]),
        ({"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count"]),
        ({"llama.rope.scaling.type": "longrope"}, ["llama.rope.scaling.type", "longrope"]),
        ({"llama.feed_forward_length": [96, 97]}, ["llama.feed_forward_length"]),
    ],
)
def test_unsupported(llama: Written, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModel) as error:
        read_architecture(llama.fields | changes, llama.shapes)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("key", ["block_count", "context_length", "attention.layer_norm_rms_epsilon"])
def test_missing_fields(llama: Written, key: str) -> None:
    fields = {name: value for name, value in llama.fields.items() if name != f"llama.{key}"}
    with pytest.raises(CheckpointError, match=f"llama.{key}"):
        read_architecture(fields, llama.shapes)


def test_missing_tensors(llama: Written) -> None:
    shapes = {name: shape for name, shape in llama.shapes.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight"):
        read_architecture(llama.fields, shapes)


def test_shapes_that_do_not_fit_the_order_of_rows(llama: Written) -> None:
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight"):
        read_architecture(llama.fields, llama.shapes | {"blk.0.attn_q.weight": (63, 64)})


@pytest.mark.parametrize("name", NAMES)
def test_wrong_values_give_typed_errors(name: str, folder: Path) -> None:
    written = write(name, folder / f"{name}-wrong")
    architecture = written.fields["general.architecture"]
    num_refused = 0
    for key in written.fields:
        if not key.startswith(f"{architecture}."):
            continue
        for value in WRONG:
            try:
                read_architecture(written.fields | {key: value}, written.shapes, written.floats)
            except QuireError:
                num_refused += 1
    assert num_refused > 100


def test_mistral3_is_read_like_llama(llama: Written) -> None:
    renamed = {key.replace("llama.", "mistral3."): value for key, value in llama.fields.items()}
    fields = renamed | {"general.architecture": "mistral3"}
    config, sources = read_architecture(fields, llama.shapes)
    assert build(config)[0] == build(llama.config)[0]
    assert sources == read_architecture(llama.fields, llama.shapes)[1]
    assert read_architecture(fields | {"mistral3.attention.temperature_scale": 0.0}, llama.shapes)[0] == config
    with pytest.raises(UnsupportedModel, match=r"mistral3\.attention\.temperature_scale needs"):
        read_architecture(fields | {"mistral3.attention.temperature_scale": 0.1}, llama.shapes)


@pytest.mark.parametrize(("name", "theirs"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3-moe", "qwen3vlmoe")])
def test_language_models_of_models_for_images_are_read_like_others(name: str, theirs: str, folder: Path) -> None:
    written = write(name, folder / name)
    own = written.fields["general.architecture"]
    fields = {key.replace(f"{own}.", f"{theirs}."): value for key, value in written.fields.items()}
    fields |= {"general.architecture": theirs, f"{theirs}.rope.dimension_sections": [16, 24, 24, 0]}
    (_, names), (spec, _) = (build(read_architecture(each, written.shapes)[0]) for each in (fields, written.fields))
    config, sources = read_architecture(fields, written.shapes)
    expected = read_architecture(written.fields, written.shapes)[1]
    found, _ = build(config)
    assert replace(found, image_rows=spec.image_rows) == spec
    assert [source for parts in names.values() for name in parts for source in sources[name]] == [
        source for parts in expected.values() for source in parts
    ]
    if theirs != "qwen2vl":
        assert found.image_rows == ImageRows(Sections((16, 24, 24), interleaved=True), 0)
        deep, _ = build(read_architecture(fields | {f"{theirs}.n_deepstack_layers": 2}, written.shapes)[0])
        assert deep.image_rows.num_deepstack == 2
        for wrong in ([16, 24, 24, 1], [16, 24], [16, 24, -1], 16, ["16", 24, 24]):
            with pytest.raises(CheckpointError, match=r"rope\.dimension_sections must be three whole numbers"):
                read_architecture(fields | {f"{theirs}.rope.dimension_sections": wrong}, written.shapes)


def test_unknown_rotations(folder: Path) -> None:
    written = write("llama3-rope", folder / "llama3")
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
        read_architecture(written.fields, written.shapes)
    for factors in ([1.0, 2.0, 3.0, 4.0], [0.0] * 4, [float("nan")] * 4, [1.0, 1.0, 1.0, float("inf")], [-1.0] * 4):
        with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight"):
            read_architecture(written.fields, written.shapes, {"rope_freqs.weight": factors}.__getitem__)


def test_unknown_rotated_parts_of_heads(folder: Path) -> None:
    written = write("gemma4", folder / "gemma4")
    for end in (1.0, 2.0, float("nan")):
        floats = {"rope_freqs.weight": [1.0] * 4 + [1e30] * 11 + [end]}
        with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
            read_architecture(written.fields, written.shapes, floats.__getitem__)


def test_layers_of_nemotron(folder: Path) -> None:
    """A layer is of the kind of its tensors; one for multi-token prediction, the last, is not part of the model."""
    written = write("nemotron-h-moe", folder / "nemotron-h-moe")
    fields, shapes = written.fields, written.shapes
    expected = read_architecture(fields, shapes)
    with pytest.raises(UnsupportedModel, match=r"nemotron_h_moe\.moe_latent_size"):
        read_architecture(fields | {"nemotron_h_moe.moe_latent_size": 32}, shapes)
    counted = {"nemotron_h_moe.block_count": 6, "nemotron_h_moe.attention.head_count_kv": 2}
    with pytest.raises(CheckpointError, match=r"block 5 has none of the tensors ssm_out\.weight"):
        read_architecture(fields | counted, shapes)
    assert read_architecture(fields | counted | {"nemotron_h_moe.nextn_predict_layers": 1}, shapes) == expected


@pytest.mark.parametrize(("name", "architecture"), [("qwen3.5", "qwen35"), ("qwen3.5-moe", "qwen35moe")])
def test_layers_for_multi_token_prediction(name: str, architecture: str, folder: Path) -> None:
    """They are counted in the file, and are not part of the model."""
    written = write(name, folder / name)
    fields = written.fields | {f"{architecture}.block_count": 5, f"{architecture}.nextn_predict_layers": 1}
    shapes = written.shapes | {
        key.replace("blk.3.", "blk.4."): shape for key, shape in written.shapes.items() if key.startswith("blk.3.")
    }
    assert read_architecture(fields, shapes) == read_architecture(written.fields, written.shapes)


def test_gates_and_ups_of_experts_in_one_tensor(folder: Path) -> None:
    """As newer converters can write them: the experts of a layer are then read as one."""
    written = write("qwen3.5-moe", folder / "qwen3.5-moe")
    shapes = {name: shape for name, shape in written.shapes.items() if "_up_exps" not in name}
    shapes = {name.replace("gate_exps", "gate_up_exps"): shape for name, shape in shapes.items()}
    shapes = {name: (6, 64, 64) if "gate_up_exps" in name else shape for name, shape in shapes.items()}
    _, sources = read_architecture(written.fields, shapes)
    (gate_up,), (down,) = (
        sources[f"model.language_model.layers.3.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj")
    )
    assert gate_up == TensorSource("blk.3.ffn_gate_up_exps.weight", None, None, None, None, None, (6 * 64, 64))
    assert down == TensorSource("blk.3.ffn_down_exps.weight", None, None, None, None, None, (6 * 64, 32))


def test_largest_gemma_scales_scores_otherwise(folder: Path) -> None:
    written = write("gemma3", folder / "gemma3")
    fields = written.fields | {"gemma3.block_count": 62, "gemma3.attention.head_count": 8}
    shapes = written.shapes | {
        name.replace("blk.0.", f"blk.{idx}."): shape for name, shape in written.shapes.items() for idx in range(62)
    }
    config, _ = read_architecture(fields, shapes)
    assert config["query_pre_attn_scalar"] == 64 // 8
    assert len(build(config)[0].layers) == 62


@pytest.mark.parametrize("value", [1e-6, 1e-5, 0.22, 5e5, 1e7, 1e11, 1 / 3, 0.08838834764831845])
def test_numbers_are_those_before_float32(value: float) -> None:
    stored = torch.tensor(value).item()
    assert torch.tensor(shortest(stored)).item() == stored
    if float(f"{value:.6g}") == value:
        assert shortest(stored) == value


def test_order_of_an_axis() -> None:
    order = AxisSwap(start=2, blocks=1, first=3, second=2, width=2)
    assert order.indices() == [0, 1, 2, 3, 6, 7, 10, 11, 4, 5, 8, 9, 12, 13]
    assert order.size == 14
