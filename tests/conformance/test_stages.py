"""Greedy tokens of a pipeline equal those of transformers: cold, again, chunked, preempted and swapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import ConfigError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families import build
from quire.models.specs.stage_spec import most_stages
from tests.conformance.conftest import Reference, slow_or_exhaustive
from tests.conformance.test_histories import load, outputs_of
from tests.conformance.test_ranks import FIT_IN_CHUNKS, SMALLEST_POOL
from tests.distributed.engines import compare_every_step
from tests.distributed.in_threads import native_library

# One family of each kind of cache and of layer; `tests/models/test_stages.py` compares the bits of all families.
NAMES = ("bundled", "falcon-h1", "gemma4", "gpt-oss", "granite4-moe", "lfm2", "llama3", "llama4", "qwen3.5")
# And in the slow run of CI: each kind of cache, and experts.
KINDS = frozenset({"falcon-h1", "gemma4", "gpt-oss", "llama3", "llama4", "qwen3.5"})
# And with ranks in each stage: one with attention alone, and one with states beside it.
GRID = frozenset({"llama3", "qwen3.5"})


# Processes take seconds to start. The default run has two stages beside one process in `tests/engine/test_stages.py`.
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_or_exhaustive(name, KINDS)) for name in NAMES])
def test_stages_under_every_history(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    short = {"num_kv_blocks": SMALLEST_POOL.get(name, 12), "max_model_len": 96}
    small = {**({} if name in FIT_IN_CHUNKS else short), "max_num_seqs": 3, "max_num_batched_tokens": 5}
    histories: list[dict[str, Any]] = [
        {},
        # One microbatch is planned as without stages, where sequences of these pools are preempted.
        {**short, "swap_space": 8 << 20, "preemption_mode": "swap", "pipeline_microbatches": 1},
        {**short, "swap_space": 8 << 20, "preemption_mode": "swap"},
        {**small, "pipeline_microbatches": 3},
    ]
    for options in histories:
        with load(reference, pipeline_parallel_size=2, **options) as llm:
            compare_every_step(llm)
            assert outputs_of(llm, reference.prompts) == reference.outputs
            # Again: from cached prefixes, where those were not evicted.
            assert outputs_of(llm, reference.prompts) == reference.outputs
            # In the larger pool of a model with states, all sequences fit.
            if options.get("pipeline_microbatches") == 1 and name not in SMALLEST_POOL:
                assert llm.stats.num_swaps > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bundled", "gemma4", "qwen3.5"])
def test_as_many_stages_as_there_can_be(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    spec, _ = build(Checkpoint.open(str(reference.folder)).config)
    size = most_stages(spec)
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size must be at most {size}, got {size + 1}"):
        load(reference, pipeline_parallel_size=size + 1)
    with load(reference, pipeline_parallel_size=size) as llm:
        assert outputs_of(llm, reference.prompts) == reference.outputs


# Processes: in the default run, ranks of stages are threads (`tests/engine/test_staged_ranks.py`).
@pytest.mark.parametrize("name", [pytest.param(name, marks=slow_or_exhaustive(name, GRID)) for name in NAMES])
def test_stages_of_two_ranks(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    short = {"num_kv_blocks": SMALLEST_POOL.get(name, 12), "max_model_len": 96}
    options: dict[str, Any] = {**short, "swap_space": 8 << 20, "preemption_mode": "swap"}
    with load(reference, pipeline_parallel_size=2, tensor_parallel_size=2, **options) as llm:
        compare_every_step(llm)
        assert outputs_of(llm, reference.prompts) == reference.outputs
        # Again: from cached prefixes, where those were not evicted.
        assert outputs_of(llm, reference.prompts) == reference.outputs
        assert llm.stats.num_preemptions > 0
