"""Images, and embeddings of media, on ranks that share a model: the tokens of transformers, and each image once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.engine.inputs.prompts import Prompt
from quire.errors import ConfigError
from tests.conformance import test_gemma3_images as gemma3
from tests.conformance.checkpoints import ragged_prompts
from tests.conformance.test_images import Pictures, case, num_encoded, pictures
from tests.conformance.test_media import Case, agree, load, run
from tests.models.gguf.writer import f32, write_gguf, write_mmproj

# Fixtures of other modules, by their names.
__all__ = ["case", "gemma_case", "pictures"]
gemma_case = pytest.fixture(scope="module", name="gemma_case")(gemma3.case.__wrapped__)  # type: ignore[attr-defined]
RANKS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
ranked = pytest.mark.parametrize("ranks", RANKS, ids=["tensor", "stages"])


def is_refused(case: Case, ranks: dict[str, Any]) -> bool:
    """Return whether a model cannot be divided, since all of its layers add features of images; check its refusal."""
    fields = json.loads((case.folder / "config.json").read_text())
    num_layers = fields["text_config"]["num_hidden_layers"]
    if len(fields["vision_config"].get("deepstack_visual_indexes", ())) < num_layers or "tensor" in next(iter(ranks)):
        return False
    with pytest.raises(
        ConfigError, match=r"must be at most 1, got 2: the model has 2 layers, the first 2 of which add"
    ):
        load(case, **ranks)
    return True


@ranked
def test_pictures_and_embeddings(case: Case, pictures: Pictures, ranks: dict[str, Any]) -> None:
    if is_refused(case, ranks):
        return
    with load(case, **ranks) as llm:
        agree(case, run(llm, case.prompts))
        for _ in range(2):
            outputs = run(llm, list[Prompt](prompt for prompt, _ in pictures))
            assert [output.outputs[0].token_ids for output in outputs] == [expected for _, expected in pictures]
            # Two pictures of one prompt are the same.
            assert num_encoded(llm) == 5


@ranked
@pytest.mark.parametrize("swap", [False, True])
def test_pictures_under_pressure(case: Case, pictures: Pictures, ranks: dict[str, Any], swap: bool) -> None:
    options: dict[str, Any] = {"num_kv_blocks": case.scarce_blocks, "max_num_batched_tokens": 7, "max_num_seqs": 3}
    if is_refused(case, ranks):
        return
    if swap:
        options |= {"swap_space": 8 << 20, "preemption_mode": "swap"}
    prompts: list[Prompt] = [prompt for prompt, _ in pictures for _ in range(3)]
    with load(case, **options, **ranks) as llm:
        outputs = run(llm, prompts)
        assert [output.outputs[0].token_ids for output in outputs] == [
            expected for _, expected in pictures for _ in range(3)
        ]


@ranked
def test_rows_that_see_each_other(gemma_case: Case, ranks: dict[str, Any]) -> None:
    others: list[Prompt] = [[token % 190 for token in prompt] for prompt in ragged_prompts()]
    with load(gemma_case, num_kv_blocks=16, **ranks) as llm:
        agree(gemma_case, run(llm, [*others, *gemma_case.prompts])[len(others) :])
        agree(gemma_case, [run(llm, [prompt])[0] for prompt in gemma_case.prompts])


@pytest.mark.parametrize("ranks", [{}, RANKS[0]], ids=["alone", "tensor"])
def test_blocks_of_another_encoder_are_not_hit(
    case: Case, pictures: Pictures, ranks: dict[str, Any], tmp_path: Path
) -> None:
    """Only rank 0 has the encoder's file, and each rank keeps its shard of the blocks on disk."""
    text, others = tmp_path / "text", tmp_path / "others"
    shutil.copytree(case.folder, others)
    tensors = load_file(others / "model.safetensors")
    changed = {name: tensor * (1.5 if "visual" in name else 1.0) for name, tensor in tensors.items()}
    save_file(changed, others / "model.safetensors", metadata={"format": "pt"})
    text.mkdir()
    files = case._replace(folder=write_gguf(case.folder, text / "model.gguf", f32))
    first = write_mmproj(case.folder, tmp_path / "first.gguf", f32)
    second = write_mmproj(others, tmp_path / "second.gguf", f32)
    prompt, _ = pictures[2]

    def logprobs(file: Path, **options: Any) -> tuple[Tensor, int]:
        with load(files, mmproj=str(file), block_size=4, **options) as llm:
            (output,) = run(llm, [prompt])
        found = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs or []]
        return torch.tensor(found), output.num_cached_tokens

    kept = {"prefix_cache_dir": str(tmp_path / "cache"), **ranks}
    expected, _ = logprobs(second)
    assert (logprobs(first, **kept)[0] - expected).abs().max() > 0.01
    for is_read in (False, True):
        found, num_cached = logprobs(second, **kept)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
        # The text before the first image may be read in any case.
        assert (num_cached > 10) == is_read
