"""Images whose rows see each other (Gemma 3): the tokens of transformers, from pixels, under every history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor

from quire import SamplingParams
from quire.engine.inputs.images.decoding import Pixels
from quire.engine.inputs.images.processing import ImageProcessing
from quire.engine.inputs.prompts import Prompt
from quire.errors import ConfigError, InvalidParameter
from quire.models.modules.vision_encoder import PatchGrid
from tests.conformance.checkpoints import NEW_TOKENS, ragged_prompts
from tests.conformance.test_images import (
    BEAMS,
    beams_of,
    continued,
    num_encoded,
    picture,
    test_asynchronous_steps_and_drafts,
    test_cold_alone_and_together,
    test_forked,
)
from tests.conformance.test_media import Case, agree, load, run
from tests.images.tiny_model import random_gemma
from tests.models.gguf.writer import f32, write_gguf, write_mmproj

# They run here too, with the `case` of this module.
__all__ = ["test_asynchronous_steps_and_drafts", "test_cold_alone_and_together", "test_forked"]
IMAGE, START, END = 200, 201, 202
TOKENS = 16  # of an image
# The window is shorter than an image.
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
    "sliding_window": 12,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 4,
    "image_size": 32,
    "initializer_range": 0.2,
    "vision_use_head": False,
}
SETTINGS: dict[str, Any] = {
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 32, "width": 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSING = ImageProcessing(4, 2, 1, (32, 32), 0, 0, "bilinear", 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
# Tokens of text before each image, and after the last one.
PLACES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((), 30),
    ((3,), 12),
    ((30,), 12),
    ((0,), 5),
    ((4, 2), 7),
    ((4, 0), 7),
    ((9,), 0),
)


def prompt_of(places: tuple[int, ...], num_last: int) -> tuple[Prompt, dict[str, Tensor]]:
    """Return a prompt with pictures, and transformers' inputs with their pixels."""
    text = iter([token % 190 for prompt in ragged_prompts() for token in prompt])
    token_ids: list[int] = []
    images: list[Image.Image] = []
    for idx, num_before in enumerate(places):
        token_ids += [next(text) for _ in range(num_before)] + [START, IMAGE, END]
        images.append(picture(20 + idx, 33, seed=idx))
    # A prompt may end with the rows of an image.
    token_ids = token_ids if num_last or not places else token_ids[:-1]
    token_ids += [next(text) for _ in range(num_last)]
    whole = [one for token in token_ids for one in [token] * (TOKENS if token == IMAGE else 1)]
    inputs = {"input_ids": torch.tensor([whole]), "attention_mask": torch.ones(1, len(whole), dtype=torch.int64)}
    if not images:
        return token_ids, inputs
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    inputs["pixel_values"] = torch.stack([pixels_of(image) for image in images])
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}, inputs


def pixels_of(image: Image.Image) -> Tensor:
    """Return the values [3, 32, 32] that the patches of an image are cut from."""
    patches = PROCESSING.patches_of("image", Pixels(image.height, image.width, image.tobytes()))
    rows, columns = PatchGrid(8, 8, 2).places(torch.device("cpu"))
    values = torch.zeros(3, 8, 4, 8, 4)
    values[:, rows, :, columns] = patches.values.view(64, 3, 4, 4).permute(0, 1, 2, 3)
    return values.view(3, 32, 32)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("gemma3-images")
    ids = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
    model = random_gemma(5, text_config=TEXT, vision_config=VISION, mm_tokens_per_image=TOKENS, **ids)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    prompts: list[Prompt] = []
    outputs, logprobs = [], []
    for places, num_last in PLACES:
        prompt, inputs = prompt_of(places, num_last)
        tokens, measured = continued(model, inputs)
        outputs.append(tokens)
        logprobs.append(measured)
        prompts.append(prompt)
    return Case(folder, prompts, outputs, logprobs, 1, 12)


def test_another_picture_is_another_prompt(case: Case) -> None:
    first: Any = case.prompts[2]
    (image,) = first["multi_modal_data"]["image"]
    other = {**first, "multi_modal_data": {"image": [picture(image.height, image.width, seed=9)]}}
    found = [next(iter(each.outputs[0].logprobs[0].values())).logprob for each in run(load(case), [first, other])]  # type: ignore[index]
    assert abs(found[0] - found[1]) > 0.01


def test_other_kernels(case: Case) -> None:
    agree(case, run(load(case, kernels="torch"), case.prompts))


@pytest.mark.parametrize(("dtype", "error"), [("int8", 0.05), ("fp8", 0.2)])
def test_keys_that_are_stored_with_fewer_bits(case: Case, dtype: str, error: float) -> None:
    llm = load(case, kv_cache_dtype=dtype)
    for output, expected in zip(run(llm, case.prompts), case.logprobs, strict=True):
        found = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs or []]
        torch.testing.assert_close(torch.tensor(found[0]), expected[0], atol=error, rtol=0)


@pytest.mark.parametrize("block_size", [4, 16])
def test_hits_that_end_in_an_image_go_back_to_its_start(case: Case, block_size: int) -> None:
    llm = load(case, block_size=block_size)
    agree(case, [run(llm, [prompt])[0] for prompt in case.prompts])
    encoded = num_encoded(llm)
    again = [run(llm, [prompt])[0] for prompt in case.prompts]
    agree(case, again)
    for output, (places, num_last) in zip(again, PLACES, strict=True):
        inside = output.num_cached_tokens - sum(places[:1]) - 1
        assert not places or not 0 < inside < TOKENS, "a hit ends inside an image"
        assert output.num_cached_tokens > 0 or not sum(places) or not num_last
    assert num_encoded(llm) == encoded


@pytest.mark.parametrize("budget", [18, pytest.param(19, marks=pytest.mark.slow), 33])
def test_chunks_end_before_or_after_images(case: Case, budget: int) -> None:
    agree(case, run(load(case, max_num_seqs=2, max_num_batched_tokens=budget), case.prompts))


def test_chunks_that_leave_time_for_others_hold_an_image(case: Case) -> None:
    llm = load(case, max_num_seqs=4, max_inter_token_ms=0.001)
    agree(case, run(llm, case.prompts))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(case: Case, mode: str) -> None:
    options = {"swap_space": 8 << 20} if mode == "swap" else {}
    llm = load(case, num_kv_blocks=16, preemption_mode=mode, **options)
    others: list[Prompt] = [[token % 190 for token in prompt] for prompt in ragged_prompts()]
    agree(case, run(llm, [*others, *case.prompts])[len(others) :])
    assert llm.stats.num_preemptions > 0


def test_beams(case: Case) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(case.folder, dtype=torch.float32).eval()
    llm = load(case)
    for places, num_last in PLACES[1:5:2]:
        prompt, inputs = prompt_of(places, num_last)
        (found,) = llm.beam_search([prompt], BEAMS)
        assert found.sequences[0].tokens[-NEW_TOKENS:] == beams_of(model, inputs)


def test_a_step_must_hold_an_image(case: Case) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens must be at least 18, got 17"):
        load(case, max_num_seqs=2, max_num_batched_tokens=17)
    llm = load(case, num_kv_blocks=7)
    with pytest.raises(InvalidParameter, match="an image of 16 tokens"):
        llm.generate([case.prompts[1]], SamplingParams(max_tokens=63), use_tqdm=False)
    features = {"offset": 0, "embeddings": torch.zeros(40, 64), "grid": (5, 8)}
    llm = load(case, max_num_seqs=2, max_num_batched_tokens=32)
    with pytest.raises(InvalidParameter, match=r"at most 30 tokens, got .an image of 40 tokens"):
        llm.generate([{"prompt_token_ids": [1] * 50, "media": [features]}], use_tqdm=False)


def test_embeddings_of_an_image_have_its_grid(case: Case) -> None:
    llm = load(case)
    encoder = llm.engine.executor._runner._embeddings._images._encoder  # type: ignore[attr-defined]
    (places, num_last), expected = PLACES[2], case.logprobs[2]
    prompt: Any = prompt_of(places, num_last)[0]
    (image,) = prompt["multi_modal_data"]["image"]
    patches = PROCESSING.patches_of("image", Pixels(image.height, image.width, image.tobytes()))
    with torch.inference_mode():
        embeddings = encoder(patches.values, 8, 8)[0]
    whole = [one for token in prompt["prompt_token_ids"] for one in [token] * (TOKENS if token == IMAGE else 1)]
    media: dict[str, Any] = {"offset": whole.index(IMAGE), "embeddings": embeddings.clone()}
    found = []
    for given in (media | {"grid": (4, 4)}, media):
        (output,) = run(llm, [{"prompt_token_ids": whole, "media": [given]}])
        logprobs = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs or []]
        found.append(torch.tensor(logprobs))
    torch.testing.assert_close(found[0], expected, atol=2e-3, rtol=0)
    assert (found[1] - expected).abs().max() > 0.05, "the rows of an image hardly see each other"


def test_names_of_published_checkpoints(case: Case, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in case.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(case.folder / "model.safetensors")
    older = {
        name.replace("vision_tower.", "vision_tower.vision_model.") if name.startswith("vision_tower.") else name: one
        for name, one in tensors.items()
    }
    save_file(older, tmp_path / "model.safetensors", metadata={"format": "pt"})
    agree(case, run(load(case._replace(folder=tmp_path)), case.prompts))


@pytest.mark.parametrize("swaps_mlps", [False, True])
def test_files_of_llama_cpp(case: Case, tmp_path: Path, swaps_mlps: bool) -> None:
    """The language model and its encoder as two GGUF files; of the first ones, MLPs' matrices have swapped names."""
    write_mmproj(case.folder, tmp_path / "mmproj-F32.gguf", f32, swaps_mlps=swaps_mlps)
    llm = load(case._replace(folder=write_gguf(case.folder, tmp_path / "model.gguf", f32)))
    agree(case, run(llm, case.prompts))
    assert num_encoded(llm) > 0
