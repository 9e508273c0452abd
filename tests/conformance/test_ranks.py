"""Greedy tokens of two ranks equal those of transformers: cold, again, chunked, preempted and swapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire.errors import ConfigError
from tests.conformance.conftest import NAMES, Reference
from tests.conformance.test_histories import load, outputs_of
from tests.distributed.in_threads import native_library

# Four ranks would divide groups of recurrent heads, each of which is normed whole.
MORE_RANKS_THAN_GROUPS = frozenset({"granite4", "granite4-moe", "falcon-h1-norm"})
# Two blocks of states for each sequence: the smallest pool that is accepted has 20.
SMALLEST_POOL = {"falcon-h1": 20}
# Windows and states: three sequences that are computed in small chunks fit into the smallest pool.
FIT_IN_CHUNKS = MORE_RANKS_THAN_GROUPS | {
    *("falcon-h1", "gemma3", "gemma4", "lfm2-moe", "mistral-window", "qwen3.5", "qwen3.5-moe")
}


# Processes take seconds to start. The default run has two ranks beside one process in `tests/engine/test_ranks.py`.
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_under_every_history(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    short = {"num_kv_blocks": SMALLEST_POOL.get(name, 12), "max_model_len": 96}
    histories: list[dict[str, Any]] = [
        {},
        {**short, "swap_space": 8 << 20, "preemption_mode": "swap"},
        {**({} if name in FIT_IN_CHUNKS else short), "max_num_seqs": 3, "max_num_batched_tokens": 5},
    ]
    for options in histories:
        with load(reference, tensor_parallel_size=2, **options) as llm:
            vars(llm.engine.scheduler)["_digest_interval"] = 1
            assert outputs_of(llm, reference.prompts) == reference.outputs
            # Again: from cached prefixes, where those were not evicted.
            assert outputs_of(llm, reference.prompts) == reference.outputs
            if "num_kv_blocks" in options:
                assert llm.stats.num_preemptions > 0
            if "swap_space" in options:
                assert llm.stats.num_swaps > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_four_ranks(name: str, references: Callable[[str], Reference]) -> None:
    native_library()
    reference = references(name)
    with load(reference, tensor_parallel_size=4) as llm:
        assert outputs_of(llm, reference.prompts) == reference.outputs


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MORE_RANKS_THAN_GROUPS))
def test_heads_that_are_normed_together_are_refused(name: str, references: Callable[[str], Reference]) -> None:
    with pytest.raises(ConfigError, match="each of which is normed whole") as refused:
        load(references(name), tensor_parallel_size=4)
    assert refused.value.field == "tensor_parallel_size"
