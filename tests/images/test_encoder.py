"""Vision encoders against those of transformers, in float32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError, ConfigError
from quire.models.families.hf_config import HFConfig
from quire.models.families.vision_towers import gemma3_vision, qwen_vision
from quire.models.loading.sizes import check_sizes
from quire.models.modules.vision_encoder import PatchGrid, VisionEncoder
from quire.models.specs import vision_spec
from quire.models.specs.spec import WeightMap
from quire.models.specs.vision_spec import LayerPieces, VisionSpec
from quire.ops.interface.ops import Ops
from quire.ops.reference.reference_ops import ReferenceOps
from tests.ops.backends import CPU_BACKENDS, Backend

QWEN: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 49,
    "out_hidden_size": 40,
    "deepstack_visual_indexes": [0, 2],
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
GEMMA: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 4,
    "vision_use_head": False,
}


def built(spec: VisionSpec, names: WeightMap, tensors: Mapping[str, Tensor], ops: Ops) -> VisionEncoder:
    """Return an encoder with the tensors of a model of transformers, all of which it takes."""
    encoder = VisionEncoder(spec, ops=ops, dtype=torch.float32, device=torch.device("cpu"))
    assert set(names) == set(encoder.weights.slots)
    left = dict(tensors)
    for name, sources in names.items():
        encoder.weights.load(name, torch.cat([left.pop(source) for source in sources]))
    assert not left
    assert not encoder.weights.missing
    return encoder


def random_weights(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.5 if parameter.ndim == 1 else 0.0))


@pytest.fixture(params=[pytest.param(Backend("cpu", ReferenceOps), id="reference"), *CPU_BACKENDS])
def ops(request: pytest.FixtureRequest) -> Ops:
    backend: Backend = request.param
    return backend.make()


@pytest.mark.parametrize(("rows", "columns"), [(2, 2), (4, 10), (14, 6), (2, 20)])
def test_qwen_features_are_those_of_transformers(ops: Ops, rows: int, columns: int) -> None:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    theirs = Qwen3VLVisionModel(Qwen3VLVisionConfig(**QWEN)).eval()
    random_weights(theirs)
    spec, names = qwen_vision(HFConfig({"vision_config": QWEN}))
    encoder = built(spec, names, {f"model.visual.{name}": tensor for name, tensor in theirs.state_dict().items()}, ops)
    values = torch.randn(rows * columns, 3 * 2 * 4 * 4)
    with torch.inference_mode():
        wanted = theirs(values, torch.tensor([[1, rows, columns]]))
        found = encoder(values, rows, columns)
    torch.testing.assert_close(found[0], wanted.pooler_output, rtol=1e-4, atol=1e-4)
    for ours, other in zip(found[1:], wanted.deepstack_features, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_qwen3_5_features_are_those_of_transformers(ops: Ops) -> None:
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    plain = {name: value for name, value in QWEN.items() if name != "deepstack_visual_indexes"}
    theirs = Qwen3_5VisionModel(Qwen3_5VisionConfig(**plain)).eval()
    random_weights(theirs)
    spec, names = qwen_vision(HFConfig({"vision_config": plain}))
    assert spec.num_features == 1
    encoder = built(spec, names, {f"model.visual.{name}": tensor for name, tensor in theirs.state_dict().items()}, ops)
    values = torch.randn(6 * 8, 3 * 2 * 4 * 4)
    with torch.inference_mode():
        wanted = theirs(values, torch.tensor([[1, 6, 8]])).pooler_output
        torch.testing.assert_close(encoder(values, 6, 8)[0], wanted, rtol=1e-4, atol=1e-4)


def test_gemma3_features_are_those_of_transformers(ops: Ops) -> None:
    from transformers import Gemma3Config
    from transformers.models.gemma3.modeling_gemma3 import Gemma3Model

    text = {
        "hidden_size": 40,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 16,
        "num_attention_heads": 2,
    }
    config: dict[str, Any] = {"vision_config": GEMMA, "text_config": text, "mm_tokens_per_image": 16}
    theirs = Gemma3Model(Gemma3Config(**config)).eval()
    random_weights(theirs)
    spec, names = gemma3_vision(HFConfig(config))
    tensors = {name: tensor for name, tensor in theirs.state_dict().items() if "language_model" not in name}
    encoder = built(spec, names, tensors, ops)
    image = torch.randn(1, 3, 48, 48)
    places = PatchGrid(12, 12, 3).places(torch.device("cpu"))
    values = image[0].unfold(1, 4, 4).unfold(2, 4, 4)[:, places[0], places[1]].transpose(0, 1).flatten(1)
    with torch.inference_mode():
        wanted = theirs.get_image_features(image).pooler_output[0]
        torch.testing.assert_close(encoder(values, 12, 12)[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("num_heads", 5), ("num_heads", 24), ("num_position_embeddings", 50), ("hidden_act", "swiglu"), ("depth", 0)),
        *(
            ("deepstack_visual_indexes", [2, 0]),
            ("deepstack_visual_indexes", [4]),
            ("deepstack_visual_indexes", [1, 1]),
        ),
        ("rope_parameters", {"rope_type": "yarn"}),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(field: str, value: object) -> None:
    named = {"num_heads": "head", "rope_parameters": "rope_type"}.get(field, field)
    with pytest.raises(ConfigError, match=named) as refused:
        qwen_vision(HFConfig({"vision_config": QWEN | {field: value}}))
    assert named in str(refused.value.field)


def test_an_image_of_gemma3_is_made_of_whole_squares() -> None:
    for changes in ({"image_size": 50}, {"image_size": 44}):
        with pytest.raises(CheckpointError, match="image_size"):
            gemma3_vision(HFConfig({"vision_config": GEMMA | changes, "mm_tokens_per_image": 16}))
    with pytest.raises(CheckpointError, match="vision_config"):
        gemma3_vision(HFConfig({}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("depth", 2**30), ("depth", 1000), ("hidden_size", 2**30), ("intermediate_size", 2**30)),
        *(("num_position_embeddings", 2**30), ("spatial_merge_size", 2**20)),
    ],
)
def test_sizes_that_no_tensor_has_are_refused_before_anything_is_made(field: str, value: int) -> None:
    spec, names = qwen_vision(HFConfig({"vision_config": QWEN}))
    encoder = VisionEncoder(spec, ops=ReferenceOps(), dtype=torch.float32, device=torch.device("cpu"))
    tensors: Any = {names[name][0]: SimpleNamespace(shape=shape) for name, shape in encoder.weights.shapes().items()}
    check_sizes(spec, tensors)
    with pytest.raises(CheckpointError):
        check_sizes(qwen_vision(HFConfig({"vision_config": QWEN | {field: value}}))[0], tensors)


@pytest.mark.parametrize(("piece_rows", "piece_scores"), [(8, 1), (12, 2 * 48**2), (16, 1 << 25), (32, 1)])
@pytest.mark.parametrize(("read", "vision"), [(qwen_vision, QWEN), (gemma3_vision, GEMMA)])
def test_pieces_of_layers_have_the_features_of_whole_layers(
    ops: Ops, read: Any, vision: Any, piece_rows: int, piece_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, _ = read(HFConfig({"vision_config": vision, "text_config": {"hidden_size": 40}, "mm_tokens_per_image": 36}))
    encoder = VisionEncoder(spec, ops=ops, dtype=torch.float32, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    for name, shape in encoder.weights.shapes().items():
        encoder.weights.load(name, torch.randn(shape, generator=generator) * 0.2)
    rows, columns = (12, 12) if read is gemma3_vision else (6, 8)
    values = torch.randn(rows * columns, math.prod(spec.patch_shape), generator=generator)
    with torch.inference_mode():
        whole = encoder(values, rows, columns)
        monkeypatch.setattr(vision_spec, "PIECE_ROWS", piece_rows)
        monkeypatch.setattr(vision_spec, "PIECE_SCORES", piece_scores)
        image = encoder.start(values, rows, columns)
        kinds, found = [], None
        while found is None:
            kinds.append(image.kind)
            found = encoder.advance(image)
    pieces = LayerPieces.of(spec, rows * columns)
    assert pieces.is_divided
    assert len(kinds) == pieces.num_pieces * len(spec.layers)
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "heads": pieces.num_row_pieces * len(spec.layers),
        "seen": pieces.num_head_pieces * len(spec.layers),
        "rest": pieces.num_row_pieces * len(spec.layers),
    }
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)
