"""The engine over modules of transformers: every feature gives what it gives over the family of the same model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from quire.errors import ConfigError

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "block_size": 8,
}
TEXTS = ["Once upon a time", "The weather in London is", "One, two, three, four, five, six, seven,"]
IDS = [[5 + (7 * idx + 3 * number) % 2000 for idx in range(length)] for number, length in enumerate((61, 3, 40, 61))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def opened(model_impl: str, **options: Any) -> LLM:
    return LLM("bundled", **{**OPTIONS, "model_impl": model_impl, "num_kv_blocks": 100, **options})


def tokens(llm: LLM, prompts: Any, params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def plain(llm: LLM) -> Any:
    return tokens(llm, IDS), tokens(llm, TEXTS)


def prefix_hits(llm: LLM) -> Any:
    first = tokens(llm, [IDS[0]])
    again = llm.generate([IDS[0], [*IDS[0][:50], 9, 8, 7]], GREEDY, use_tqdm=False)
    assert [output.num_cached_tokens for output in again] == [60, 50]
    return first, [list(output.outputs[0].token_ids) for output in again]


def samples(llm: LLM) -> Any:
    return tokens(llm, IDS[:2], SamplingParams(n=3, seed=7, temperature=0.8, top_p=0.9, max_tokens=16, ignore_eos=True))


def beams(llm: LLM) -> Any:
    found = llm.beam_search(TEXTS[:2], BeamSearchParams(beam_width=3, max_tokens=12))
    return [[list(beam.tokens) for beam in output.sequences] for output in found]


def grammars(llm: LLM) -> Any:
    schema = {"type": "object", "properties": {"name": {"enum": ["Ann", "Ben"]}}, "required": ["name"]}
    params = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=StructuredOutputs(json=schema))
    return [output.outputs[0].text for output in llm.generate(TEXTS, params, use_tqdm=False)]


def embeddings(llm: LLM) -> Any:
    return [list(output.outputs.embedding) for output in llm.embed(TEXTS, use_tqdm=False)]


def log_probabilities(llm: LLM) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    seen = []
    for output in llm.generate(IDS[1:3], params, use_tqdm=False):
        steps = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
        seen.append([{token: one.logprob for token, one in (step or {}).items()} for step in steps])
    return seen


def media(llm: LLM) -> Any:
    given = torch.randn(4, 256, generator=torch.Generator().manual_seed(3))
    return tokens(llm, [{"prompt_token_ids": IDS[2], "media": [{"offset": 5, "embeddings": given}]}, IDS[2]])


CASES: dict[str, tuple[Callable[[LLM], Any], dict[str, Any]]] = {
    "batched and chunked": (plain, {"max_num_batched_tokens": 16}),
    "prefix hits": (prefix_hits, {}),
    "preempted by recomputation": (plain, {"num_kv_blocks": 13, "preemption_mode": "recompute"}),
    "swapped": (plain, {"num_kv_blocks": 13, "preemption_mode": "swap", "swap_space": 16 << 20}),
    "samples": (samples, {}),
    "beams": (beams, {}),
    "grammars": (grammars, {}),
    "embeddings": (embeddings, {}),
    "log probabilities": (log_probabilities, {"max_num_batched_tokens": 16}),
    "embeddings in prompts": (media, {}),
    "drafts by lookup": (plain, {"speculative_method": "ngram"}),
    "drafts of a model": (plain, {"speculative_method": "draft", "draft_model": "bundled"}),
    "steps planned ahead": (plain, {"async_scheduling": True}),
    "cache of int8": (plain, {"kv_cache_dtype": "int8"}),
}


# Cases of the default run.
QUICK = ("batched and chunked", "prefix hits", "beams", "swapped", "log probabilities")


def is_same(one: Any, other: Any) -> bool:
    """Return whether two results are equal, floats to within 1e-3."""
    if isinstance(one, float):
        return bool(abs(one - other) < 1e-3)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES]
)
def test_features_give_what_they_give_over_a_family(case: str) -> None:
    run, options = CASES[case]
    hosted, native = opened("transformers", **options), opened("native", **options)
    assert is_same(run(hosted), run(native))
    assert hosted.stats.num_preemptions == native.stats.num_preemptions
    assert (hosted.stats.num_preemptions > 0) == (options.get("num_kv_blocks") == 13)


def test_the_start_states_what_computes_the_model() -> None:
    hosted, native = opened("transformers"), opened("native")
    assert (hosted.resolved.model_impl, native.resolved.model_impl) == ("transformers", "native")
    assert any(line.startswith("Modules of transformers") for line in hosted.resolved.lines())
    assert "modules of transformers" in hosted.resolved.kernels


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"deterministic": True}, "deterministic"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_method": "mtp"}, "speculative_method"),
    ],
)
def test_unsupported_options_are_refused_by_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        opened("transformers", **options)
    assert caught.value.field == field


def test_a_family_is_served_without_transformers() -> None:
    program = (
        "import sys\n"
        "from quire import LLM\n"
        "LLM('bundled', num_threads=1, num_kv_blocks=100)\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
