"""How many sequences run at once: the plan, the line at start and the scheduler say the same, on published shapes.

The scheduler and the memory are real and built by the loader's own functions. The data plane only counts: it draws no
token, so that a sequence whose prompt is computed stays as long as it is and keeps what it holds.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.config import CACHE_DTYPES, EngineConfig, Machine, ModelFacts, resolve
from quire.engine.startup import loading
from quire.engine.startup.kv_cache import open_memory
from quire.errors import InvariantViolation
from quire.memory import FullAttention, KVCacheSpec
from quire.memory.capacity.sizing import ArenaSizing, most_bytes, sequence_bytes, tokens_bytes
from quire.models.capacity.planner import plan_memory
from quire.models.capacity.pool_sizing import memory_concurrency, num_kept_free, size_pool
from quire.models.capacity.report import PlanRequest
from quire.models.checkpoints.checkpoint import read_config
from quire.models.families import build
from quire.models.families.quantization_config import without_quantization
from quire.models.specs.cache_layout import cache_specs
from quire.scheduling.plan import ItemResult, StepPlan, StepResult
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request
from tests.conformance.checkpoints import save_checkpoint
from tests.models.published import CONFIGS

# With blocks of 16 tokens, a window of a multiple of 16 touches most blocks at these lengths, and fewer at others.
LENGTHS = (1022, 4094)
# Sequences of the first length that the pool has about room for.
NUM_ROOMS = 24


def count_only(plan: StepPlan) -> StepResult:
    """Execute a plan without drawing a token."""
    return StepResult(plan.tick, tuple(ItemResult(item.seq_id, ()) for item in plan.items))


def most_running(scheduler: Scheduler, num_tokens: int, num_requests: int) -> int:
    """Queue prompts of `num_tokens` tokens that share nothing, and return how many sequences come to run at once."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    for number in range(num_requests):
        prompt = [number * num_tokens + idx for idx in range(num_tokens)]
        scheduler.add(Request(str(number), prompt, params, num_tokens + 1, frozenset(), arrival=number, seed=0))

    def run_until_nobody_can_grow() -> None:
        while True:
            plan = scheduler.plan(0)
            scheduler.update_from_results(plan.items, count_only(plan).items)

    # All that were let in are computed in the end, and wait for a token that never comes.
    with pytest.raises(InvariantViolation, match="S3"):
        run_until_nobody_can_grow()
    return len(scheduler.running)


def specs_of(config: EngineConfig) -> tuple[KVCacheSpec, ...]:
    """Return the cache groups that the loader has for a model in bfloat16."""
    spec, _ = build(without_quantization(read_config(config.model.model)))
    return cache_specs(spec, config.cache.block_size, CACHE_DTYPES["bfloat16"], 2)


def facts_of(config: EngineConfig, specs: tuple[KVCacheSpec, ...], max_model_len: int) -> ModelFacts:
    """Return what the loader finds of a model, as far as its pool is concerned."""
    return ModelFacts(
        max_position=max_model_len,
        bytes_per_token=tokens_bytes(specs) // config.cache.block_size,
        vocab_size=1 << 20,
        num_parameters=1,
        most_bytes=most_bytes(specs, max_model_len, config.scheduler.max_num_seqs),
        longest_bytes=ArenaSizing.of(specs, 0).bytes_for(max_model_len),
        concurrency=lambda count: memory_concurrency(config, size_pool(specs, count), max_model_len, "cpu"),
    )


def scheduler_of(config: EngineConfig, num_tokens: int) -> tuple[Scheduler, int]:
    """Return a scheduler for sequences of a length as the loader makes it, and the concurrency of the line at start."""
    specs = specs_of(config)
    machine = Machine(device="cpu", available_bytes=1 << 50, num_threads=1)
    resolved = resolve(config, machine, facts_of(config, specs, num_tokens))
    memory = open_memory(resolved, size_pool(specs, resolved.num_blocks), ExitStack())
    return loading._scheduler(resolved, memory, None, None, config.parallel), resolved.max_concurrency


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_the_line_at_start_and_the_scheduler_agree(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    specs = specs_of(EngineConfig.from_options(model=str(tmp_path)))
    num_bytes = NUM_ROOMS * sequence_bytes(specs, LENGTHS[0])
    config = EngineConfig.from_options(model=str(tmp_path), kv_cache_memory_bytes=num_bytes)
    for num_tokens in LENGTHS:
        scheduler, stated = scheduler_of(config, num_tokens)
        running = most_running(scheduler, num_tokens, 2 * NUM_ROOMS)
        assert running == stated, "the line at start says otherwise"
        plan = plan_memory(PlanRequest(config=config, lengths=(num_tokens,)))
        assert [each.concurrency for each in plan.lengths] == [running], "the plan says otherwise"
        assert running > NUM_ROOMS // 2 or num_tokens > LENGTHS[0], "nearly as many as the bytes have room for"
        # Where windows touch fewer blocks, more may run for a while, but never fewer.
        scheduler, stated = scheduler_of(config, num_tokens + 2)
        assert most_running(scheduler, num_tokens + 2, 2 * NUM_ROOMS) >= stated


@pytest.mark.parametrize("family", ["granite4", "falcon-h1", "qwen3.5", "lfm2"])
def test_a_running_engine_with_default_options_runs_as_many_as_it_says(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path / family)
    options: dict[str, Any] = {"max_model_len": 96, "block_size": 4, "num_threads": 1, "skip_tokenizer_init": True}
    with closing(LLM(str(folder), num_kv_blocks=2000, **options)) as llm:
        engine = llm.engine
        expected = engine.config.max_concurrency
        assert expected > 4, "the pool has room for several"
        (line,) = (line for line in engine.config.lines() if "maximum concurrency" in line)
        assert line.endswith(f"for 96 tokens per request: {expected:,}x")
        assert most_running(engine.scheduler, 95, expected + 4) >= expected


@pytest.mark.parametrize(("num_slabs", "kept"), [(12, 0), (49, 0), (50, 1), (74, 1), (149, 1), (150, 2), (1000, 10)])
def test_the_watermark_is_the_nearest_number_of_slabs(num_slabs: int, kept: int) -> None:
    """Models with large states have an arena of fewer than 100 slabs."""
    sizing = size_pool([FullAttention(block_size=16)], num_slabs)
    assert sizing.layout.num_slabs == num_slabs
    assert (num_kept_free(sizing, 0.01), num_kept_free(sizing, 0.0)) == (kept, 0)
