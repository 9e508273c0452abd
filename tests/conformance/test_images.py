"""Prompts with images of rows and columns: the tokens of transformers, from pixels, under every history."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from quire import LLM, BeamSearchParams, SamplingParams
from quire.engine.inputs.images.decoding import Pixels
from quire.engine.inputs.images.processing import ImageProcessing
from quire.engine.inputs.prompts import Prompt
from quire.engine.startup import vision
from quire.errors import InvalidParameter, PromptTooLong, RequestError, UnsupportedFeature
from quire.models.families.hf_config import HFConfig
from quire.models.families.vision_towers import qwen_vision
from quire.models.modules.vision_encoder import VisionEncoder
from quire.ops.reference.reference_ops import ReferenceOps
from tests.conformance.checkpoints import NEW_TOKENS, ragged_prompts
from tests.conformance.test_media import Case, agree, load, run

IMAGE, START, END = 200, 201, 202
BEAMS = BeamSearchParams(beam_width=3, max_tokens=NEW_TOKENS, ignore_eos=True)
TEXT: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "spatial_merge_size": 2,
    "initializer_range": 0.2,
}
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": TEXT["rope_parameters"] | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
IDS = {"image_token_id": IMAGE, "video_token_id": 203, "vision_start_token_id": START, "vision_end_token_id": END}


SETTINGS: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 256, "longest_edge": 5120},
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSING = ImageProcessing(4, 2, 2, None, 256, 5120, "bicubic", 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Family(NamedTuple):
    """A class of transformers, and what its configuration has beside the common fields."""

    name: str
    text: dict[str, Any] = {}  # noqa: RUF012
    vision: dict[str, Any] = {}  # noqa: RUF012


FAMILIES = {
    "qwen3-vl": Family("Qwen3VL", {}, {"deepstack_visual_indexes": [0, 1]}),
    # As many additions as layers: from the last one on only output rows are computed.
    "qwen3-vl-deep": Family("Qwen3VL", {"num_hidden_layers": 2}, {"deepstack_visual_indexes": [0, 1]}),
    "qwen3.5": Family("Qwen3_5", RECURRENT),
}
# Grids of patches of each prompt's images, and the number of tokens of text before each, and at the end.
Places = tuple[tuple[tuple[int, int], int], ...]
PLACES: tuple[tuple[Places, int], ...] = (
    ((), 30),
    ((((4, 6), 3),), 12),
    # The same number of tokens in another grid.
    ((((6, 4), 3),), 12),
    ((((2, 12), 3),), 12),
    ((((8, 10), 0),), 5),
    ((((4, 4), 4), ((2, 6), 2)), 7),
    ((((4, 4), 4), ((4, 4), 0)), 7),
    ((((4, 6), 9),), 1),
)


@pytest.fixture(scope="module", params=["qwen3-vl", "qwen3.5", pytest.param("qwen3-vl-deep", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    config_class = getattr(transformers, f"{family.name}Config")
    config = config_class(text_config=TEXT | family.text, vision_config=VISION | family.vision, **IDS)
    torch.manual_seed(5)
    model = getattr(transformers, f"{family.name}ForConditionalGeneration")(config).eval()
    model.save_pretrained(folder)
    encoder = encoder_of(folder)
    prompts: list[Prompt] = []
    outputs, logprobs = [], []
    for places, num_last in PLACES:
        prompt, inputs = prompt_of(encoder, places, num_last)
        tokens, measured = continued(model, inputs)
        outputs.append(tokens)
        logprobs.append(measured)
        prompts.append(prompt)
    assert len({tuple(output) for output in outputs[1:4]}) == 3, "the grid hardly matters"
    return Case(folder, prompts, outputs, logprobs, 3 if "5" in request.param else 1, 16)


def continued(model: Any, inputs: dict[str, Tensor]) -> tuple[list[int], Tensor]:
    """Return transformers' greedy tokens after a prompt, and their log probabilities."""
    greedy = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with torch.inference_mode():
        given = model.generate(**inputs, generation_config=greedy, output_logits=True, return_dict_in_generate=True)
    measured = torch.stack([step[0].log_softmax(-1).max() for step in given.logits])
    return given.sequences[0, -NEW_TOKENS:].tolist(), measured


def beams_of(model: Any, inputs: dict[str, Tensor]) -> list[int]:
    """Return the tokens of transformers' best of three beams."""
    settings = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=3, eos_token_id=None, pad_token_id=0
    )
    with torch.inference_mode():
        return list(model.generate(**inputs, generation_config=settings)[0, -NEW_TOKENS:].tolist())


def encoder_of(folder: Path) -> VisionEncoder:
    """Return the vision encoder of a checkpoint."""
    spec, names = qwen_vision(HFConfig(json.loads((folder / "config.json").read_text())))
    encoder = VisionEncoder(spec, ops=ReferenceOps(), dtype=torch.float32, device=torch.device("cpu"))
    tensors = load_file(folder / "model.safetensors")
    for name, sources in names.items():
        encoder.weights.load(name, torch.cat([tensors[source] for source in sources]))
    return encoder


def prompt_of(encoder: VisionEncoder, places: Places, num_last: int) -> tuple[Prompt, dict[str, Tensor]]:
    """Return a prompt with the features of images, and the inputs of transformers with their pixels."""
    token_ids: list[int] = []
    media: list[dict[str, object]] = []
    pixels, grids = [], []
    text = iter([token % 190 for prompt in ragged_prompts() for token in prompt])
    for idx, ((rows, columns), num_before) in enumerate(places):
        token_ids += [next(text) for _ in range(num_before)] + [START]
        # The same image whatever its grid.
        values = torch.randn(80, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(idx))[: rows * columns]
        with torch.inference_mode():
            features = encoder(values, rows, columns).transpose(0, 1).flatten(1)
        media.append({"offset": len(token_ids), "embeddings": features, "grid": (rows // 2, columns // 2)})
        token_ids += [IMAGE] * len(features) + [END]
        pixels.append(values)
        grids.append([1, rows, columns])
    token_ids += [next(text) for _ in range(num_last)]
    inputs = {
        "input_ids": torch.tensor([token_ids]),
        "attention_mask": torch.ones(1, len(token_ids), dtype=torch.int64),
    }
    if not places:
        return token_ids, inputs
    inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
    inputs["mm_token_type_ids"] = (inputs["input_ids"] == IMAGE).int()
    return {"prompt_token_ids": token_ids, "media": media}, inputs


def test_cold_alone_and_together(case: Case) -> None:
    llm = load(case, enable_prefix_caching=False)
    agree(case, [run(llm, [prompt])[0] for prompt in case.prompts])
    agree(case, run(llm, case.prompts))


def test_hits_also_those_that_end_in_an_image(case: Case) -> None:
    llm = load(case, block_size=4)
    agree(case, [run(llm, [prompt])[0] for prompt in case.prompts])
    again = [run(llm, [prompt])[0] for prompt in case.prompts]
    agree(case, again)
    assert all(output.num_cached_tokens > 0 for output in again)


@pytest.mark.parametrize(
    "budget", [pytest.param(2, marks=pytest.mark.slow), 5, pytest.param(16, marks=pytest.mark.slow)]
)
def test_chunks_that_end_in_images(case: Case, budget: int) -> None:
    agree(case, run(load(case, max_num_seqs=2, max_num_batched_tokens=budget), case.prompts))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(case: Case, mode: str) -> None:
    options = {"swap_space": 8 << 20} if mode == "swap" else {}
    llm = load(case, num_kv_blocks=case.scarce_blocks, preemption_mode=mode, **options)
    others: list[Prompt] = [[token % 190 for token in prompt] for prompt in ragged_prompts()]
    agree(case, run(llm, [*others, *case.prompts])[len(others) :])
    assert llm.stats.num_preemptions > 0


def test_forked(case: Case) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
    outputs = run(load(case), case.prompts, params)
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [[o] * 3 for o in case.outputs]


def test_beams(case: Case) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(case.folder, dtype=torch.float32).eval()
    encoder, llm = encoder_of(case.folder), load(case)
    for places, num_last in PLACES[1:6:2]:
        prompt, inputs = prompt_of(encoder, places, num_last)
        (found,) = llm.beam_search([prompt], BEAMS)
        assert found.sequences[0].tokens[-NEW_TOKENS:] == beams_of(model, inputs)


def test_asynchronous_steps_and_drafts(case: Case) -> None:
    agree(case, run(load(case, async_scheduling=True), case.prompts))
    agree(case, run(load(case, speculative_config={"method": "ngram", "num_speculative_tokens": 3}), case.prompts))


def test_a_grid_belongs_to_the_tokens_of_its_embeddings(case: Case) -> None:
    llm = load(case)
    prompt: Any = case.prompts[1]
    (media,) = prompt["media"]
    for grid in ((3, 3), (0, 0), (-2, -3), (6,), 6, ("2", "3"), (2.0, 3.0)):
        changed = {"prompt_token_ids": prompt["prompt_token_ids"], "media": [media | {"grid": grid}]}
        with pytest.raises(InvalidParameter, match=r"media\[0\]\.grid"):
            llm.generate([changed], use_tqdm=False)


# Prompts, and transformers' tokens for them.
Pictures = list[tuple[dict[str, Any], list[int]]]


def picture(width: int, height: int, seed: int) -> Image.Image:
    noise = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.frombytes("RGB", (width, height), noise.numpy().tobytes())


def num_encoded(llm: LLM) -> int:
    """Return how many images the runner of an engine has encoded."""
    assert llm.stats.images is not None
    return llm.stats.images.num_encoded


@pytest.fixture(scope="module")
def pictures(case: Case) -> Pictures:
    """Return prompts with pictures, and transformers' tokens for their patches."""
    (case.folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    model = transformers.AutoModelForImageTextToText.from_pretrained(case.folder, dtype=torch.float32).eval()
    found = []
    for sizes in ([(20, 33)], [(33, 20)], [(8, 8), (70, 20)], [(16, 16), (16, 16)]):
        images = [picture(*size, seed=7) for size in sizes]
        token_ids = [token % 190 for token in ragged_prompts()[0][:9]]
        token_ids += [token for _ in images for token in (START, IMAGE, END)] + [3, 5, 8, 13]
        patches = [PROCESSING.patches_of("image", Pixels(each.height, each.width, each.tobytes())) for each in images]
        expanded: list[int] = []
        left = iter(patches)
        for token in token_ids:
            expanded += [token] * (len(next(left).values) // 4 if token == IMAGE else 1)
        inputs = {"input_ids": torch.tensor([expanded]), "pixel_values": torch.cat([each.values for each in patches])}
        inputs["image_grid_thw"] = torch.tensor([[1, each.rows, each.columns] for each in patches])
        inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"])}
        inputs |= {"mm_token_type_ids": (inputs["input_ids"] == IMAGE).int()}
        with torch.inference_mode():
            tokens = model.generate(
                **inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}
        found.append((prompt, tokens[0, -NEW_TOKENS:].tolist()))
    return found


def test_pictures_are_encoded_once(case: Case, pictures: Pictures, tmp_path: Path) -> None:
    cache = {"prefix_cache_dir": str(tmp_path / "cache"), "swap_space": 16 << 20}
    llm = load(case, **cache, block_size=4)
    for prompt, expected in pictures:
        (output,) = run(llm, [prompt])
        assert output.outputs[0].token_ids == expected
    # Two pictures of one prompt are the same.
    assert num_encoded(llm) == 5
    for prompt, expected in pictures:
        (output,) = run(llm, [prompt])
        assert output.outputs[0].token_ids == expected
        assert output.num_cached_tokens > 0
    assert num_encoded(llm) == 5
    llm.close()
    again = load(case, **cache, block_size=4)
    for prompt, expected in pictures:
        assert run(again, [prompt])[0].outputs[0].token_ids == expected
    # Whole blocks of a prompt's beginning come from disk; a prompt that ends in its image may need some of its rows.
    assert num_encoded(again) <= 1
    again.close()


def test_pictures_under_pressure(case: Case, pictures: Pictures) -> None:
    prompts: list[Prompt] = []
    prompts += [prompt for prompt, _ in pictures] * 3
    expected = [tokens for _, tokens in pictures] * 3
    for options in (
        {"num_kv_blocks": case.scarce_blocks},
        {"num_kv_blocks": case.scarce_blocks, "swap_space": 8 << 20, "preemption_mode": "swap"},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
    ):
        llm = load(case, **options)
        assert [output.outputs[0].token_ids for output in run(llm, prompts)] == expected
        llm.close()


def test_a_picture_is_a_file_its_path_or_an_image(case: Case, pictures: Pictures, tmp_path: Path) -> None:
    llm = load(case)
    prompt, expected = pictures[0]
    (image,) = prompt["multi_modal_data"]["image"]
    path = tmp_path / "a.png"
    image.save(path)
    for form in (path, path.read_bytes(), image, [image]):
        (output,) = run(llm, [{"prompt_token_ids": prompt["prompt_token_ids"], "multi_modal_data": {"image": form}}])
        assert output.outputs[0].token_ids == expected
    cut = Image.open(BytesIO(path.read_bytes()[:200]))
    ids = prompt["prompt_token_ids"]
    for data, words in (
        ({"image": b"no image"}, r"multi_modal_data\.image\[0\]"),
        ({"image": tmp_path / "none.png"}, r"image\[0\].*No such file"),
        # A client's JSON can have a text.
        ({"image": str(path)}, r"image\[0\] must be bytes of an image file, its path as a pathlib\.Path, or"),
        ({"image": 5}, r"image\[0\] must be bytes of an image file, its path as a pathlib\.Path, or an image of"),
        ({"image": cut}, r"image\[0\] must be an image that can be decoded"),
        ({"image": [image, image]}, "with 2 tokens 200, one for each image, got 'one with 1'"),
        ({"video": image}, 'a mapping with "image"; videos and audio are not supported'),
        (image, 'a mapping with "image"'),
        ({"image": picture(1, 300, 0)}, "factor of at most 200"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate([{"prompt_token_ids": ids, "multi_modal_data": data}], use_tqdm=False)
    with pytest.raises(PromptTooLong):
        llm.generate([{"prompt_token_ids": ids * 2, "multi_modal_data": {"image": [picture(400, 400, 0)] * 2}}])
    assert not llm.engine.has_unfinished
    llm.close()


def test_texts_are_served_where_images_are_not(
    case: Case, pictures: Pictures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = case.prompts[0]
    settings = case.folder / "preprocessor_config.json"
    whole = settings.read_text()
    for changed, words in (
        (json.dumps(SETTINGS | {"patch_size": 16}), "patch_size must be 4"),
        (json.dumps(SETTINGS | {"image_processor_type": "Other"}), "Other"),
        ("{", "preprocessor_config"),
    ):
        settings.write_text(changed)
        caplog.clear()
        llm = load(case)
        assert words in caplog.text
        assert run(llm, [text])[0].outputs[0].token_ids == case.outputs[0]
        with pytest.raises(UnsupportedFeature, match="multi_modal_data is not supported"):
            llm.generate([pictures[0][0]], use_tqdm=False)
        llm.close()
    settings.write_text(whole)
    monkeypatch.setattr(vision, "find_spec", lambda _name: None)
    caplog.set_level("INFO")
    llm = load(case)
    assert "quire[vision]" in caplog.text
    assert run(llm, [text])[0].outputs[0].token_ids == case.outputs[0]
    llm.close()
