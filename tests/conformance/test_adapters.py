"""Adapters equal the model of transformers with their products added to its weights, alone and under every history.

The default run has one family of each kind of layers, the slow run all of them (and ranks of some). PEFT itself says
what its folders mean in `tests/models/adapters/test_peft.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from quire import LLM, LoRARequest, SamplingParams
from quire.memory import check
from tests.conformance.checkpoints import FAMILIES, UNSHARED, ragged_prompts, save_checkpoint
from tests.conformance.conftest import slow_or_exhaustive
from tests.distributed.engines import compare_every_step, llm_of_threads
from tests.distributed.in_threads import native_library
from tests.models.adapters.folders import linear_widths, merge, random_matrices, write_adapter

# Attention alone, heads stored in another order and gated, layers that read others' keys, experts with a shared one,
# states beside attention in each layer, a short convolution.
DEFAULT = ("llama3", "qwen3.5-moe", "gemma4", "falcon-h1", "lfm2")
SCALES = {"one": 2.0, "two": 1.0}
ADAPTERS = [LoRARequest("one"), None, LoRARequest("two"), LoRARequest("one"), None, LoRARequest("two"), None]
MEASURED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


class Adapted(NamedTuple):
    """A checkpoint, the folders of two adapters, prompts, and transformers' log probabilities of these.

    Args:
        expected: by the name of the adapter, "" for none: [T, V] for each prompt.
    """

    folder: Path
    adapters: dict[str, Path]
    prompts: list[list[int]]
    expected: dict[str, list[torch.Tensor]]


@pytest.fixture(scope="session")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from a family to its checkpoint with adapters, which is made once."""
    return cache(lambda family: make_adapted(family, tmp_path_factory.mktemp(family)))


def make_adapted(family: str, scratch: Path) -> Adapted:
    folder = save_checkpoint(family, scratch / "model")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    widths = linear_widths(model, *(("router",) if family == "llama4" else ()))
    # The second is for some of the layers, with a rank of its own.
    some = {name: each for idx, (name, each) in enumerate(widths.items()) if idx % 3}
    tensors = {"one": random_matrices(widths, 4, 1), "two": random_matrices(some, 7, 2)}
    adapters = {
        name: write_adapter(scratch / name, each, lora_alpha=SCALES[name] * len(next(iter(each.values()))))
        for name, each in tensors.items()
    }
    prompts = ragged_prompts()
    expected = {"": logprobs(model, prompts)}
    for name, each in tensors.items():
        merge(model, each, SCALES[name])
        expected[name] = logprobs(model, prompts)
        merge(model, each, -SCALES[name])
    return Adapted(folder, adapters, prompts, expected)


@torch.no_grad()
def logprobs(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [model(torch.tensor([prompt])).logits[0].float().log_softmax(-1) for prompt in prompts]


def load(adapted: Adapted, **options: Any) -> LLM:
    return LLM(**options_of(adapted, **options))


def options_of(adapted: Adapted, **options: Any) -> dict[str, Any]:
    paths = {name: str(path) for name, path in adapted.adapters.items()}
    defaults: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "block_size": 8}
    defaults |= {"max_model_len": 128, "num_kv_blocks": 800, "enable_lora": True, "lora_modules": paths}
    return {"model": str(adapted.folder), **defaults, **options}


def tokens(llm: LLM, adapted: Adapted, params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(adapted.prompts, params, lora_request=ADAPTERS, use_tqdm=False)
    check(llm.engine.scheduler.memory)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in FAMILIES]
)
def test_log_probabilities_of_a_batch_with_several_adapters(adapted: Any, family: str) -> None:
    case = adapted(family)
    for kernels in ("native", "torch"):
        with load(case, kernels=kernels, max_num_batched_tokens=40, max_num_seqs=8) as llm:
            outputs = llm.generate(case.prompts, MEASURED, lora_request=ADAPTERS, use_tqdm=False)
        for idx, (prompt, output, adapter) in enumerate(zip(case.prompts, outputs, ADAPTERS, strict=True)):
            expected = case.expected["" if adapter is None else adapter.lora_name][idx]
            known: Any = output.prompt_logprobs
            found = [known[at][token].logprob for at, token in enumerate(prompt) if at]
            wanted = expected[torch.arange(len(prompt) - 1), prompt[1:]]
            torch.testing.assert_close(torch.tensor(found), wanted, rtol=2e-4, atol=2e-4)
            assert output.outputs[0].token_ids == [int(expected[-1].argmax())]
        assert not torch.allclose(case.expected["one"][0], case.expected[""][0], atol=0.1)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=slow_or_exhaustive(name)) for name in FAMILIES if name not in UNSHARED]
)
def test_two_ranks_have_the_tokens_of_one_process(adapted: Any, family: str) -> None:
    native_library()
    case = adapted(family)
    with load(case) as one, load(case, tensor_parallel_size=2, max_num_batched_tokens=40, max_num_seqs=8) as two:
        compare_every_step(two)
        expected = tokens(one, case)
        assert tokens(two, case) == expected == tokens(two, case)  # then from cached prefixes


# Ranks are threads here: `tests/conformance/test_stages.py` has processes.
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=slow_or_exhaustive(name, {"qwen3.5-moe"})) for name in DEFAULT]
)
def test_stages_have_the_tokens_of_one_process(adapted: Any, family: str) -> None:
    case = adapted(family)
    options: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 8}
    with load(case) as one:
        expected = tokens(one, case)
    for size in (1, 2):
        with llm_of_threads(size=size, stages=2, **options_of(case, **options)) as staged:
            assert tokens(staged, case) == expected == tokens(staged, case)  # then from cached prefixes


@pytest.mark.parametrize("family", ["llama3", *(pytest.param(x, marks=pytest.mark.slow) for x in DEFAULT[1:])])
def test_every_history_gives_the_tokens_of_each_request_alone(adapted: Any, family: str) -> None:
    case = adapted(family)
    with load(case, enable_prefix_caching=False) as llm:
        alone = [
            llm.generate([prompt], GREEDY, lora_request=adapter, use_tqdm=False)[0].outputs[0].token_ids
            for prompt, adapter in zip(case.prompts, ADAPTERS, strict=True)
        ]
        assert tokens(llm, case) == alone
    with load(case, max_num_seqs=3, max_num_batched_tokens=5) as llm:  # chunks, then prefix hits
        assert tokens(llm, case) == alone == tokens(llm, case)
        pair = llm.generate(case.prompts, replace(GREEDY, n=2), lora_request=ADAPTERS, use_tqdm=False)
        assert [[sample.token_ids for sample in output.outputs] for output in pair] == [[each] * 2 for each in alone]
    small: dict[str, Any] = {"num_kv_blocks": 14, "max_model_len": 96} if family == "llama3" else {}
    for swap in ({}, {"swap_space": 8 << 20, "preemption_mode": "swap"}):
        with load(case, **small, **swap) as llm:
            assert tokens(llm, case) == alone
            assert not small or llm.stats.num_preemptions > 0
    with load(case, speculative_method="suffix", num_speculative_tokens=4) as llm:
        assert tokens(llm, case) == alone == tokens(llm, case)


def test_a_beam_search_is_that_of_the_merged_model(adapted: Any, tmp_path: Path) -> None:
    case = adapted("llama3")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    widths = linear_widths(model)
    merge(model, random_matrices(widths, 4, 1), SCALES["one"])
    model.save_pretrained(tmp_path)
    beams = SamplingParams(beam_width=3, max_tokens=8, temperature=0.0)
    with load(case) as llm, LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=200, max_model_len=128) as other:
        adapter = LoRARequest("one")
        ours = llm.generate(case.prompts[:3], beams, lora_request=adapter, use_tqdm=False)
        theirs = other.generate(case.prompts[:3], beams, use_tqdm=False)
        shown = [[[beam.token_ids for beam in output.outputs] for output in outputs] for outputs in (ours, theirs)]
        assert shown[0] == shown[1]
        embedded = [
            torch.tensor(each.embed(case.prompts[:3], lora_request=one, use_tqdm=False)[1].outputs.embedding)
            for each, one in ((llm, adapter), (other, None), (llm, None))
        ]
        torch.testing.assert_close(embedded[0], embedded[1], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(embedded[0], embedded[2], atol=1e-2)
