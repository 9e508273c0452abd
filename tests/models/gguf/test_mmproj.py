"""Files of vision encoders: values of each type, the choice of one of several, and wrong files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file

from quire.cli.inspect import lines as describe
from quire.engine.inputs.images.settings import read_processing
from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.checkpoints.vision_files import find_mmproj, find_vision
from quire.models.loading.inspection import EncoderInspection, inspect
from quire.models.loading.vision import load_vision_encoder
from quire.models.modules.vision_encoder import VisionEncoder
from tests.conformance import test_gemma3_images as gemma3_images
from tests.conformance.test_images import IDS, PROCESSING, SETTINGS, TEXT, VISION
from tests.images.tiny_model import random_gemma
from tests.models.gguf.cases import save_checkpoint
from tests.models.gguf.writer import f32, write_gguf, write_mmproj


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint, and its model and its encoder as GGUF files."""
    folder = tmp_path_factory.mktemp("qwen3-vl")
    vision = VISION | {"deepstack_visual_indexes": [0, 2]}
    parts: dict[str, Any] = {"text_config": TEXT, "vision_config": vision, **IDS}
    config = transformers.Qwen3VLConfig(**parts)
    torch.manual_seed(5)
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    write_mmproj(folder, folder / "mmproj-F32.gguf", f32)
    write_gguf(folder, folder / "model.gguf", f32)
    return folder


def encoder_of(files: Checkpoint | None) -> VisionEncoder:
    assert files is not None
    return load_vision_encoder(
        files, device="cpu", dtype=torch.float32, kernels="reference", quantization=None, weight_packing="plain"
    )


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0])
def test_features_are_those_of_the_values(files: Path, kind: Type, tmp_path: Path) -> None:
    """Rounded weights have the features of an encoder with the same values in float32."""

    def type_of(_name: str, shape: tuple[int, ...]) -> Type:
        return kind if kind is not Type.Q8_0 or shape[-1] % 32 == 0 else Type.F16

    path = write_mmproj(files, tmp_path / "mmproj.gguf", type_of)
    model = Checkpoint.open(str(files / "model.gguf"))
    rounded, plain = (find_vision(model, str(each)) for each in (path, files / "mmproj-F32.gguf"))
    found, expected = encoder_of(rounded), encoder_of(plain)
    values = torch.randn(6 * 8, 96)
    with torch.inference_mode():
        first, other = found(values, 6, 8), expected(values, 6, 8)
    assert 0 < (first - other).std() < 0.02 * other.std()


def test_one_of_several_encoders_is_preferred(tmp_path: Path) -> None:
    model = tmp_path / "model-Q8_0.gguf"
    model.touch()
    assert find_mmproj(model) is None
    for names, expected in (
        (("mmproj.gguf",), "mmproj.gguf"),
        (("a-mmproj-Q8_0.gguf",), "a-mmproj-Q8_0.gguf"),
        (("mmproj-F32.gguf",), "mmproj-F32.gguf"),
        (("mmproj-model-f16.gguf",), "mmproj-model-f16.gguf"),
        (("mmproj-BF16.gguf",), "mmproj-BF16.gguf"),
    ):
        for name in names:
            (tmp_path / name).touch()
        assert find_mmproj(model) == tmp_path / expected
    (tmp_path / "other.mmproj-bf16.gguf").touch()
    with pytest.raises(CheckpointError, match=r"one vision encoder .* mmproj-BF16\.gguf, other\.mmproj-bf16\.gguf"):
        find_mmproj(model)


def edited(path: Path, out: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """Write a file with other fields and tensors."""
    reader = gguf.GGUFReader(path)
    fields = {
        name: (field.types[0], field.contents(), field.types[-1])
        for name, field in reader.fields.items()
        if not name.startswith(("GGUF.", "general.architecture"))
    }
    tensors = {each.name: each.data.copy() for each in reader.tensors}
    values = {name: value for name, (_, value, _) in fields.items()} | {"general.architecture": "clip"}
    change(values, tensors)
    writer = gguf.GGUFWriter(out, values.pop("general.architecture"))
    for name, value in values.items():
        kind, _, item = fields.get(name, (None, None, None))
        if kind is None or not isinstance(value, type(fields[name][1])):
            kind = gguf.GGUFValueType.get_type(value)
            item = None
        writer.add_key_value(name, value, kind, item if kind is gguf.GGUFValueType.ARRAY else None)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def field(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda fields, _: fields.update({name: value})


def without(name: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(fields: dict[str, Any], tensors: dict[str, Any]) -> None:
        fields.pop(name, None)
        tensors.pop(name, None)

    return change


def renamed(name: str, other: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda _, tensors: tensors.update({other: tensors.pop(name)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (field("general.architecture", "llama"), "general.architecture is 'llama'"),
        (field("clip.projector_type", "mlp"), "clip.projector_type is 'mlp', but only gemma3, qwen3vl_merger are"),
        (field("clip.projector_type", "gemma3"), "projector.scale_factor must be a divisor of the 6 patches"),
        (field("clip.has_vision_encoder", False), "clip.has_vision_encoder must be true"),
        (field("clip.has_audio_encoder", True), "clip.has_audio_encoder false"),
        (field("clip.use_gelu", False), "clip.use_gelu is False"),
        (field("clip.vision.projection_dim", 65), "projection_dim must be 64 as for .* got 65"),
        (field("clip.vision.image_size", 28), "clip.vision.image_size must be the side of the square of 36 patches"),
        (field("clip.vision.patch_size", 0), "clip.vision.patch_size must be an integer from 1"),
        (field("clip.vision.block_count", 2**31), "clip.vision.block_count must be an integer from 1 to 1024"),
        (field("clip.vision.block_count", 4), "is_deepstack_layers must be a list of 4 flags"),
        (field("clip.vision.embedding_length", 2**30), r"hidden_size is 1,073,741,824, but the largest"),
        (field("clip.vision.feed_forward_length", 10**9), r"intermediate_size is 1,000,000,000, but the largest"),
        (field("clip.vision.spatial_merge_size", 3), "of a merged square is 288, but the largest"),
        (field("clip.vision.attention.head_count", 5), "num_attention_heads"),
        (field("clip.vision.image_std", [0.5, 0.0, 0.5]), "clip.vision.image_std must be three positive numbers"),
        (field("clip.vision.image_mean", [0.5]), "clip.vision.image_mean must be a list of 3 numbers"),
        (field("clip.vision.image_max_pixels", 1), "clip.vision.image_max_pixels must be at least"),
        (without("clip.vision.attention.layer_norm_epsilon"), "layer_norm_epsilon is missing"),
        (without("v.patch_embd.weight.1"), r"the file has no tensor 'v\.patch_embd\.weight\.1'"),
        (without("v.position_embd.weight"), r"the file has no tensor 'v\.position_embd\.weight'"),
        (renamed("mm.2.bias", "mm.3.bias"), r"the file has no tensor 'mm\.2\.bias'"),
        (lambda _, tensors: tensors.update({"v.pre_ln.weight": tensors["v.post_ln.weight"]}), r"the tensor 'v\.pre_ln"),
        (lambda _, tensors: tensors.update({"mm.0.bias": tensors["mm.2.bias"]}), "mm|merger"),
    ],
)
def test_a_wrong_encoder_is_refused(files: Path, tmp_path: Path, change: Any, words: str) -> None:
    path = edited(files / "mmproj-F32.gguf", tmp_path / "mmproj.gguf", change)
    model = Checkpoint.open(str(files / "model.gguf"))
    with pytest.raises((CheckpointError, UnsupportedModel), match=words) as caught:
        encoder_of(find_vision(model, str(path)))
    assert str(tmp_path) in str(caught.value) or "config.json" in str(caught.value)


def test_an_inspection_describes_the_encoder_or_why_it_is_refused(files: Path, tmp_path: Path) -> None:
    tensors = load_file(files / "model.safetensors").items()
    num_values = sum(values.numel() for name, values in tensors if name.startswith("model.visual."))
    for path, place in ((files / "model.gguf", str(files / "mmproj-F32.gguf")), (files, "")):
        expected = EncoderInspection(place, 3, 32, 4, num_values, 4 * num_values)
        assert inspect(Checkpoint.open(str(path))).encoder == expected
    (tmp_path / "mmproj.gguf").write_bytes(b"GGUF")
    found = inspect(Checkpoint.open(str(files / "model.gguf")), mmproj=str(tmp_path / "mmproj.gguf"))
    assert found.encoder is not None
    assert str(tmp_path) in found.encoder.problem
    assert found.problem == ""
    lines = "\n".join(describe(found, (), has_metadata=False))
    assert f"images        would be refused: {tmp_path}" in lines
    lines = "\n".join(describe(inspect(Checkpoint.open(str(files))), (), has_metadata=False))
    assert f"images        3 layers of 32, patches of 4x4 pixels, {num_values:,} values in {4 * num_values:,}" in lines


def test_settings_are_those_of_the_file_or_of_the_published_processors(files: Path, tmp_path: Path) -> None:
    def without_limits(fields: dict[str, Any], _: dict[str, Any]) -> None:
        del fields["clip.vision.image_min_pixels"], fields["clip.vision.image_max_pixels"]

    model = Checkpoint.open(str(files / "model.gguf"))
    assert model.config["image_token_id"] == IDS["image_token_id"]
    found = find_vision(model)
    assert found is not None
    assert found.image_settings is not None
    spec = encoder_of(found).spec
    assert read_processing(found.image_settings, spec) == PROCESSING
    plain = find_vision(model, str(edited(files / "mmproj-F32.gguf", tmp_path / "mmproj.gguf", without_limits)))
    assert plain is not None
    assert plain.image_settings is not None
    processing = read_processing(plain.image_settings, spec)
    assert (processing.min_pixels, processing.max_pixels) == (65_536, 16_777_216)


def test_a_model_of_text_takes_no_encoder(files: Path, tmp_path: Path) -> None:
    save_checkpoint("qwen3", tmp_path)
    path = write_gguf(tmp_path, tmp_path / "model.gguf", f32)
    with pytest.raises(UnsupportedModel, match=r"encoder of a Qwen3VLFor.* is a Qwen3ForCausalLM"):
        find_vision(Checkpoint.open(str(path)), str(files / "mmproj-F32.gguf"))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Gemma 3, and its model and its encoder as GGUF files."""
    folder = tmp_path_factory.mktemp("gemma3")
    parts = {"text_config": gemma3_images.TEXT, "vision_config": gemma3_images.VISION}
    random_gemma(5, mm_tokens_per_image=16, image_token_index=200, **parts).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(gemma3_images.SETTINGS))
    write_mmproj(folder, folder / "mmproj-F32.gguf", f32)
    write_gguf(folder, folder / "model.gguf", f32)
    return folder


def test_an_encoder_of_one_size_has_the_settings_of_its_processor(gemma3: Path) -> None:
    found = find_vision(Checkpoint.open(str(gemma3 / "model.gguf")))
    assert found is not None
    assert found.image_settings is not None
    assert read_processing(found.image_settings, encoder_of(found).spec) == gemma3_images.PROCESSING


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (field("clip.vision.projector.scale_factor", 3), "scale_factor must be a divisor of the 8 patches of a side"),
        (field("clip.vision.projection_dim", 96), "projection_dim must be 64 as for .* got 96"),
        (field("clip.vision.feed_forward_length", 40), "48"),
        (without("mm.soft_emb_norm.weight"), r"the file has no tensor 'mm\.soft_emb_norm\.weight'"),
        (without("mm.input_projection.weight"), r"the file has no tensor 'mm\.input_projection\.weight'"),
    ],
)
def test_a_wrong_encoder_of_one_size_is_refused(gemma3: Path, tmp_path: Path, change: Any, words: str) -> None:
    path = edited(gemma3 / "mmproj-F32.gguf", tmp_path / "mmproj.gguf", change)
    with pytest.raises((CheckpointError, UnsupportedModel), match=words):
        encoder_of(find_vision(Checkpoint.open(str(gemma3 / "model.gguf")), str(path)))


def test_an_encoder_belongs_to_a_family(files: Path, gemma3: Path) -> None:
    for folder, other in ((files, gemma3), (gemma3, files)):
        with pytest.raises(UnsupportedModel, match=r"it is the encoder of a .* in the vocabulary, and .* is a "):
            find_vision(Checkpoint.open(str(folder / "model.gguf")), str(other / "mmproj-F32.gguf"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_damaged_file_is_refused_or_read(files: Path, gemma3: Path, tmp_path: Path, seed: int) -> None:
    """Each of a hundred copies with other bytes in their headers, or cut off, has a typed error, or can be loaded."""
    rng = random.Random(seed)
    num_refused = 0
    for number in range(100):
        folder = (files, gemma3)[number % 2]
        data = bytearray((folder / "mmproj-F32.gguf").read_bytes())
        num_header = min(tensor.data_offset for tensor in gguf.GGUFReader(folder / "mmproj-F32.gguf").tensors)
        for _ in range(rng.randint(1, 2)):
            start = rng.randrange(min(num_header, len(data) - 1))
            kind = rng.choice((0, 0, 0, 1, 2, 3))
            if kind == 0:
                data[start] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[start : start + 8] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8)))
            elif kind == 2:
                other = rng.randrange(num_header)
                data[start : start + 16] = data[other : other + 16]
            else:
                del data[1 + start : 1 + start + rng.choice((1, 4, 8, len(data)))]
        path = tmp_path / "mmproj.gguf"
        path.write_bytes(data)
        try:
            encoder_of(find_vision(Checkpoint.open(str(folder / "model.gguf")), str(path)))
        except (CheckpointError, UnsupportedModel):
            num_refused += 1
    assert num_refused > 50
