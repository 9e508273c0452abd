"""A cache in another dtype: the same tokens under every history, and logits close to those of the plain cache.

A token's keys and values are quantised by themselves, when they are stored. So what a sequence reads does not depend on
how it came about, and each engine here is compared with a cold run of its own kind.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.memory import check
from tests.conformance.checkpoints import POOL_FACTORS, ragged_prompts, save_checkpoint

NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
# All tokens; windows, and layers that read what others store; states beside attention.
FAMILIES = ("qwen3", pytest.param("gemma4", marks=pytest.mark.slow), pytest.param("lfm2", marks=pytest.mark.slow))
# The most that a log probability of a prompt's token may change by; without scales, or with one for all, over 1.1.
BOUNDS = {"bfloat16": 0.15, "fp8": 1.0, "int8": 0.3}


class Case(NamedTuple):
    """A checkpoint, and what an engine continues prompts with that computes each from nothing."""

    folder: Path
    stored: str
    prompts: list[list[int]]
    outputs: list[list[int]]
    pool_factor: int


def load(folder: Path, stored: str, **options: Any) -> LLM:
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1}
    defaults |= {"max_model_len": 96, "block_size": 8, "num_kv_blocks": 200, "kv_cache_dtype": stored}
    return LLM(str(folder), **defaults | options)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    path = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return path, POOL_FACTORS.get(request.param, 1)


@pytest.fixture(scope="module", params=["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, folder: tuple[Path, int]) -> Case:
    path, pool_factor = folder
    cold = load(path, request.param, num_kv_blocks=200 * pool_factor, enable_prefix_caching=False)
    prompts = ragged_prompts()
    outputs = [tokens_of(cold, [prompt])[0] for prompt in prompts]
    return Case(path, request.param, prompts, outputs, pool_factor)


def start(case: Case, *, num_kv_blocks: int = 200, **options: Any) -> LLM:
    return load(case.folder, case.stored, num_kv_blocks=num_kv_blocks * case.pool_factor, **options)


def tokens_of(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check(llm.engine.scheduler.memory)
    return [output.outputs[0].token_ids for output in outputs]


def test_batched_and_hit(case: Case) -> None:
    llm = start(case)
    for _ in range(2):
        assert tokens_of(llm, case.prompts) == case.outputs


def test_chunked(case: Case) -> None:
    llm = start(case, max_num_seqs=2, max_num_batched_tokens=7)
    assert tokens_of(llm, case.prompts) == case.outputs


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(case: Case, mode: str) -> None:
    options: dict[str, Any] = {"swap_space": 8 << 20} if mode == "swap" else {}
    # States stay as they are: beside blocks so small, the longest sequence takes more of them.
    num_blocks = max(12, start(case).resolved.longest_blocks)
    llm = load(case.folder, case.stored, num_kv_blocks=num_blocks, preemption_mode=mode, **options)
    assert tokens_of(llm, case.prompts * 3) == case.outputs * 3
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_swaps == (llm.stats.num_preemptions if mode == "swap" else 0)


def test_forked(case: Case) -> None:
    llm = start(case)
    forked = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
    outputs = llm.generate(case.prompts, forked, use_tqdm=False)
    assert [[each.token_ids for each in output.outputs] for output in outputs] == [[o] * 3 for o in case.outputs]
    assert llm.stats.num_copies > 0


def test_restarted_from_disk(case: Case, tmp_path: Path) -> None:
    """What one engine stored, the next one finds; one that stores another dtype finds nothing."""
    options: dict[str, Any] = {"prefix_cache_dir": str(tmp_path / "cache"), "swap_space": 16 << 20}
    first = start(case, **options)
    assert tokens_of(first, case.prompts) == case.outputs
    first.close()
    for stored in ("float32", "fp8" if case.stored == "int8" else "int8"):
        other = start(case._replace(stored=stored), **options)
        outputs = other.generate(case.prompts, GREEDY, use_tqdm=False)
        assert sum(output.num_disk_tokens for output in outputs) == 0
        other.close()
    again = start(case, **options)
    outputs = again.generate(case.prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == case.outputs
    assert sum(output.num_disk_tokens for output in outputs) > 40
    again.close()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("stored", BOUNDS)
def test_logits_are_close_to_those_of_the_plain_cache(folder: tuple[Path, int], stored: str, kernels: str) -> None:
    """A prompt's log probabilities, computed in chunks, so that most keys and values are read from the cache."""
    path, pool_factor = folder
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    prompt = max(ragged_prompts(), key=len)
    options = {"max_num_batched_tokens": 4, "max_num_seqs": 1, "kernels": kernels, "num_kv_blocks": 200 * pool_factor}

    def logprobs(name: str) -> list[float]:
        (output,) = load(path, name, **options).generate([prompt], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        return [each[token].logprob for each, token in zip(output.prompt_logprobs, prompt, strict=True) if each]

    pairs = zip(logprobs(stored), logprobs("auto"), strict=True)
    assert 0 < max(abs(found - expected) for found, expected in pairs) < BOUNDS[stored]


def test_a_dtype_that_nothing_stores_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, bfloat16, .*, got 'int4'") as caught:
        load(tmp_path, "int4")
    assert caught.value.field == "kv_cache_dtype"
