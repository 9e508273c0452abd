"""The model that copies copies, in Quire and in transformers, and drafts are right where it does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.make_copier import SMALL, tensors_of
from benchmarks.make_model import save
from quire import LLM, SamplingParams

VOCAB_SIZE, NUM_NEW = 4096, 48


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copier")
    config = SMALL | {"vocab_size": VOCAB_SIZE}
    save(config, tensors_of(config), folder)
    return folder


@pytest.fixture(scope="module")
def text() -> list[int]:
    """Return tokens of which some come several times, but no three in the same order."""
    rng = random.Random(0)
    tokens = [rng.randrange(10, 200) for _ in range(300)]
    assert len({tuple(tokens[i : i + 3]) for i in range(298)}) == 298
    return tokens


def continued(copier: Path, prompt: list[int], **options: Any) -> tuple[list[int], LLM]:
    llm = LLM(str(copier), skip_tokenizer_init=True, num_threads=1, max_model_len=512, num_kv_blocks=100, **options)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, detokenize=False)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids, llm


@pytest.mark.slow
@pytest.mark.parametrize("start", [130, 0])
def test_it_goes_on_where_the_last_three_tokens_stood_before(copier: Path, text: list[int], start: int) -> None:
    prompt = [*text, 5, *text[start : start + 4]]
    expected = text[start + 4 : start + 4 + NUM_NEW]
    assert continued(copier, prompt)[0] == expected
    model = AutoModelForCausalLM.from_pretrained(copier, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None)
    assert output[0, len(prompt) :].tolist() == expected


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_are_right(copier: Path, text: list[int], method: str) -> None:
    options: dict[str, Any] = {"draft_model": str(copier)} if method == "draft" else {}
    output, llm = continued(copier, [*text, 5, *text[:4]], speculative_method=method, **options)
    assert output == text[4 : 4 + NUM_NEW]
    assert llm.stats.num_accepted_tokens > NUM_NEW / 2
