"""Ranks on Triton's kernels, interpreted: two processes give the greedy tokens of transformers, as one does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.execution.runners.ranked_executor import RankedExecutor
from quire.execution.runners.runner import InProcessExecutor
from quire.memory import check
from tests.conformance.checkpoints import (
    EOS_TOKEN_ID,
    POOL_FACTORS,
    generate_with_transformers,
    ragged_prompts,
    save_checkpoint,
)
from tests.distributed.engines import compare_every_step
from tests.distributed.in_threads import native_library
from tests.engine.test_adapters import WIDTHS
from tests.models.adapters.folders import random_matrices, write_adapter
from tests.ops.triton.device import INTERPRETED_MARKS
from tests.ops.triton.test_engine import load

pytestmark = INTERPRETED_MARKS
NUM_TOKENS = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
CAPTURED = {"cudagraph_capture_sizes": (2,), "max_num_seqs": 2}
PIECES = {"cudagraph_mode": "full_and_piecewise", "piecewise_cudagraph_capture_sizes": (16,)}
MORE = pytest.mark.exhaustive


def runner_of(llm: LLM) -> Any:
    executor = llm.engine.executor
    assert isinstance(executor, RankedExecutor)
    assert isinstance(executor._inner, InProcessExecutor)
    return executor._inner._runner


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama3", CAPTURED),
        ("llama3", {**CAPTURED, **PIECES, "async_scheduling": True}),
        ("qwen3.5", {}),
        ("gpt-oss", {**CAPTURED, "enable_expert_parallel": True}),
        pytest.param("llama3", {"all_reduce_backend": "gloo"}, marks=MORE),
        pytest.param("qwen3.5", CAPTURED, marks=MORE),
        pytest.param("llama3", {**CAPTURED, "async_scheduling": True}, marks=MORE),
        pytest.param("qwen3.5", {**CAPTURED, **PIECES, "async_scheduling": True}, marks=MORE),
        pytest.param("granite4", CAPTURED, marks=MORE),
        pytest.param("gemma4", {}, marks=MORE),
    ],
)
def test_two_ranks(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Prompts together and in chunks, then decodes: launched as they come, or captured on both ranks."""
    native_library()
    folder, prompts = save_checkpoint(name, tmp_path), [prompt[-12:] for prompt in ragged_prompts()[1:3]]
    expected = generate_with_transformers(folder, prompts, [EOS_TOKEN_ID])
    options = {"max_num_batched_tokens": 16, **options}
    with load(str(folder), POOL_FACTORS.get(name, 1), tensor_parallel_size=2, **options) as llm:
        compare_every_step(llm)
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
        for tokens, known in zip(found, expected, strict=True):
            # What the reference ends by itself is compared as far as it goes.
            assert list(tokens[: len(known)]) == list(known[:NUM_TOKENS])
        runner = runner_of(llm)
        assert (runner.captured is not None) == ("cudagraph_capture_sizes" in options)
        if runner.captured is not None:
            assert runner.captured.num_replayed >= NUM_TOKENS - 2
            assert (runner.captured.num_replayed_in_pieces > 0) == ("cudagraph_mode" in options)
        check(llm.engine.scheduler.memory)


@pytest.mark.parametrize("options", [CAPTURED, pytest.param({}, marks=MORE)], ids=["captured", "launched"])
def test_two_ranks_with_adapters(options: dict[str, Any], tmp_path: Path) -> None:
    """Rows of two adapters, and then of one and of the model alone, have the tokens of one process."""
    native_library()
    model = str(save_checkpoint("llama3", tmp_path / "model"))
    paths = {name: str(write_adapter(tmp_path / name, random_matrices(WIDTHS, 4, seed)))
             for seed, name in enumerate(("one", "two"))}  # fmt: skip
    prompts = [prompt[-12:] for prompt in ragged_prompts()[1:3]]

    def run(llm: LLM) -> list[list[int]]:
        one, two = LoRARequest("one"), LoRARequest("two")
        rounds: list[list[LoRARequest | None]] = [[one, two], [None, one]]
        found = [llm.generate(prompts, GREEDY, lora_request=each, use_tqdm=False) for each in rounds]
        return [list(output.outputs[0].token_ids) for outputs in found for output in outputs]

    lora: dict[str, Any] = {"enable_lora": True, "lora_modules": paths}
    with load(model, kernels="torch", **lora) as one:
        expected = run(one)
    assert len(set(map(tuple, expected))) == 4
    with load(model, tensor_parallel_size=2, **lora, **options) as two:
        assert run(two) == expected
        runner = runner_of(two)
        assert (runner.captured is not None) == bool(options)
        if runner.captured is not None:
            assert runner.captured.num_replayed == 2 * (NUM_TOKENS - 1)
