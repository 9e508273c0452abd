"""Results that are the same, bit for bit, under every history."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from tests.conformance.checkpoints import FAMILIES, save_checkpoint
from tests.ops.backends import LIBRARIES

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no native kernels were built")

# Longer than a part, ragged, two pairs of them with beginnings in common, one of them past a part.
_seeds = random.Random(3)
_long = [_seeds.randrange(200) for _ in range(640)]
PROMPTS = [_long, [5], [*_long[:600], 9, 8], [_seeds.randrange(200) for _ in range(70)], _long[:40], _long[:530]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=3)
RANDOM = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=30, ignore_eos=True, logprobs=3)
# What differs from `TINY`: windows, norms behind mixers and capped logits; experts; sinks, and experts with biases.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", {"sliding_window": 300, "query_pre_attn_scalar": 64, "final_logit_softcapping": 20.0}),
    "experts": (
        "Qwen3Moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 300}),
}
TINY = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "eos_token_id": 7,
}


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "gpt-oss")) for name in MODELS]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, options = MODELS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(1)
    model_class(model_class.config_class(**TINY, **options)).bfloat16().save_pretrained(path)
    return path


def load(folder: Path, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "device": "cpu", "deterministic": True}
    defaults |= {"max_model_len": 800, "block_size": 8, "num_kv_blocks": 800}
    return LLM(str(folder), **defaults | options)


def results(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[Any]:
    """Return tokens and log probabilities."""
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(output.token_ids, output.logprobs) for output in outputs]


@pytest.mark.parametrize(
    ("stored", "params"),
    [
        pytest.param("auto", GREEDY, id="greedy-auto"),
        pytest.param("int8", RANDOM, id="random-int8", marks=pytest.mark.slow),
        pytest.param("int8", GREEDY, id="greedy-int8", marks=pytest.mark.slow),
        pytest.param("auto", RANDOM, id="random-auto"),
    ],
)
def test_every_history_gives_the_same_bits(folder: Path, stored: str, params: SamplingParams) -> None:
    alone = load(folder, kv_cache_dtype=stored, enable_prefix_caching=False)
    expected = [results(alone, [prompt], params)[0] for prompt in PROMPTS]
    together = load(folder, kv_cache_dtype=stored)
    assert results(together, PROMPTS, params) == expected
    assert results(together, PROMPTS, params) == expected  # from the cache now
    assert together.stats.prefix_hits > 1000
    in_chunks = load(folder, kv_cache_dtype=stored, max_num_batched_tokens=97, max_num_seqs=5)
    assert results(in_chunks, PROMPTS, params) == expected
    # Short prompts that all start, and outgrow the pool.
    short = [1, 3, 4] * 8
    for mode in ("recompute", "swap"):
        pool = {"num_kv_blocks": 120, "watermark": 0.0, "preemption_mode": mode, "swap_space": 1 << 26}
        scarce = load(folder, kv_cache_dtype=stored, enable_prefix_caching=False, **pool)
        assert results(scarce, [PROMPTS[idx] for idx in short], params) == [expected[idx] for idx in short]
        assert scarce.stats.num_preemptions > 0


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_drafts_give_the_same_bits(folder: Path, params: SamplingParams) -> None:
    expected = results(load(folder), PROMPTS, params)
    llm = load(folder, speculative_method="suffix")
    llm.engine.step_recorder.speculation = None  # how fast this machine is does not matter
    for _ in range(2):
        assert results(llm, PROMPTS, params) == expected
        assert [results(llm, [prompt], params)[0] for prompt in PROMPTS] == expected
    assert llm.stats.num_accepted_tokens > 200


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_company_whose_prompt_is_measured_changes_no_bits(folder: Path, quantization: str | None) -> None:
    """Beside it all layers compute every row, alone the last one computes only the rows that are read."""
    measured = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    alone = load(folder, quantization=quantization, enable_prefix_caching=False)
    expected = [results(alone, [prompt], GREEDY)[0] for prompt in PROMPTS]
    llm = load(
        folder, quantization=quantization, max_num_batched_tokens=211, max_num_seqs=6, enable_prefix_caching=False
    )
    for first in (0, 3):
        params = [measured if idx == first else GREEDY for idx in range(len(PROMPTS))]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs] == expected
        assert [each.prompt_logprobs is not None for each in outputs] == [each is measured for each in params]


def test_rounded_weights(folder: Path) -> None:
    alone = load(folder, quantization="int8", enable_prefix_caching=False)
    expected = [results(alone, [prompt], GREEDY)[0] for prompt in PROMPTS]
    llm = load(folder, quantization="int8", max_num_batched_tokens=97, max_num_seqs=5)
    assert results(llm, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("family", ["lfm2", "granite4", "falcon-h1", "qwen3.5", "llama4", "gemma4"])
def test_models_for_which_it_is_not_known_are_refused(family: str, tmp_path: Path) -> None:
    assert family in FAMILIES
    with pytest.raises(ConfigError, match="deterministic is for models of attention") as caught:
        load(save_checkpoint(family, tmp_path), max_model_len=64, dtype="bfloat16")
    assert caught.value.field == "deterministic"


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"kernels": "torch"}, "deterministic", "needs native kernels"),
        ({"dtype": "float32"}, "deterministic", "linear layers of bfloat16.*one is of float32"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "needs kv_cache_dtype 'auto', 'bfloat16' or 'int8', got 'fp8'"),
        ({"deterministic": 1}, "deterministic", "true or false"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        LLM("bundled", **{"deterministic": True, "num_kv_blocks": 128, "max_model_len": 256} | options)
    assert caught.value.field == field
