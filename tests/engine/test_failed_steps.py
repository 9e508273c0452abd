"""A step that fails at any point leaves no unwritten block to read and nothing held."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams
from quire.config import EngineConfig, Machine, ModelFacts, resolve
from quire.engine.engine import Engine
from quire.engine.inputs.request_options import RequestOptions
from quire.errors import WorkerError
from quire.memory import (
    FullAttention,
    KVCacheManager,
    KVCacheSpec,
    Namespace,
    RecurrentState,
    SlidingWindow,
    check,
)
from quire.memory.recording.replay import replay
from quire.scheduling.plan import LaunchedStep, StepPlan
from quire.scheduling.scheduler import Scheduler
from tests.engine.ahead_simulation import AheadSimulation
from tests.engine.failing import FailingExecutor, FailingSimulation, Failures
from tests.engine.test_async_drafts import short_rests
from tests.scheduling.harness import Setting

SIZE, VOCAB = 4, 11
FULL = FullAttention(block_size=SIZE)
WINDOW = SlidingWindow(block_size=SIZE, window=7)
BIG_WINDOW = SlidingWindow(block_size=SIZE, window=6, num_layers=5)
STATE = RecurrentState(block_size=SIZE, layer_bytes=3 * FULL.bytes_per_block)
# Cache groups, bytes of the arena and of the host tier, which are small: blocks are demoted, promoted and moved, and
# sequences are swapped and preempted.
WORLDS: dict[str, tuple[tuple[KVCacheSpec, ...], int, int]] = {
    "full": ((FULL,), 24, 0),
    "full, host": ((FULL,), 18, 40),
    "full and window": ((FULL, WINDOW), 36, 0),
    "full and window, host": ((FULL, WINDOW), 36, 60),
    "unequal blocks": ((FULL, BIG_WINDOW), 90, 0),
    "unequal blocks, host": ((FULL, BIG_WINDOW), 90, 120),
    "states": ((FULL, STATE), 70, 0),
    "states, host": ((FULL, STATE), 70, 90),
}


def simulated(
    specs: tuple[KVCacheSpec, ...],
    num_blocks: int,
    host_blocks: int,
    failures: Failures | None,
    *,
    is_async: bool = False,
) -> Engine:
    """Return the real engine, scheduler and memory over a simulated data plane."""
    facts = ModelFacts(max_position=64, bytes_per_token=4, vocab_size=VOCAB, num_parameters=1)
    options = EngineConfig.from_options(block_size=SIZE, num_kv_blocks=500, max_num_seqs=8, max_num_batched_tokens=24)
    config = resolve(options, Machine(device="cpu", available_bytes=1 << 30, num_threads=1), facts)
    memory = KVCacheManager(
        specs,
        num_bytes=num_blocks * FULL.bytes_per_block,
        host_bytes=host_blocks * FULL.bytes_per_block,
        snapshot_interval=2 * SIZE,
        pin_limit=3,
        retention_limit=4,
    )
    scheduler = Scheduler(
        memory,
        max_num_seqs=8,
        max_num_batched_tokens=24,
        preemption_mode="swap" if host_blocks else "recompute",
        plans_ahead=is_async,
    )
    executor = (AheadSimulation if is_async else FailingSimulation)(SIZE, VOCAB, specs)
    executor.failures = failures or Failures(random.Random(0), 0.0)
    return Engine(config, scheduler, executor, None, end_token_ids=frozenset(), cache_name="")


def request(rng: random.Random, shared: list[int]) -> tuple[list[int], dict[str, Any]]:
    """Return a prompt and sampling parameters; prompts share beginnings."""
    prompt = shared[: rng.randrange(1, len(shared))] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
    more: dict[str, Any] = {"n": rng.choice((1, 1, 2, 3))}
    if rng.random() < 0.15:
        more = {"beam_width": 2, "n": 1, "temperature": 0.0}
    return prompt, {"max_tokens": rng.randrange(1, 12), "ignore_eos": True, "detokenize": False, **more}


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(sample.token_ids) for sample in output.outputs]


def alone(specs: tuple[KVCacheSpec, ...], prompt: list[int], params: dict[str, Any], seed: int) -> list[list[int]]:
    """Return what a request gives in an engine of its own that has plenty of memory and never fails."""
    engine = simulated(specs, 4000, 0, None)
    engine.add_request("alone", {"prompt_token_ids": prompt}, SamplingParams(seed=seed, **params))
    outputs: dict[str, list[list[int]]] = {}
    while engine.has_unfinished:
        collect(outputs, engine.step())
    return outputs["alone"]


def collect(outputs: dict[str, list[list[int]]], news: list[RequestOutput]) -> list[str]:
    """Add the tokens of deltas; return who failed."""
    failed = []
    for output in news:
        if output.error is not None:
            failed.append(output.request_id)
        samples = outputs.setdefault(output.request_id, [])
        for sample in output.outputs:
            samples += [[] for _ in range(sample.index + 1 - len(samples))]
            samples[sample.index] += sample.token_ids
    return failed


def run_world(
    name: str, seed: int, num_requests: int, *, is_async: bool = False, drafts: str = ""
) -> tuple[int, int, int]:
    """Serve random requests while steps fail; return the requests that succeeded, the failures and the copies lost."""
    rng = random.Random(f"{name} {seed}")
    specs, num_blocks, host_blocks = WORLDS[name]
    failures = Failures(rng, 0.08)
    engine = simulated(specs, num_blocks, host_blocks, failures, is_async=is_async)
    engine.scheduler.drafts.drafter = Setting(drafts=drafts).build_drafter(engine.executor)  # type: ignore[arg-type]
    memory = engine.scheduler.memory
    shared = [rng.randrange(VOCAB) for _ in range(22)]
    waiting = {f"{idx}": (*request(rng, shared), idx) for idx in range(num_requests)}
    asked = dict(waiting)
    outputs: dict[str, list[list[int]]] = {}
    failed: set[str] = set()
    while waiting or engine.has_unfinished:
        while waiting and rng.random() < 0.4:
            request_id = next(iter(waiting))
            prompt, params, own_seed = waiting.pop(request_id)
            params = {**params, "seed": own_seed}
            prompt_dict = {"prompt_token_ids": prompt}
            engine.add_request(
                request_id, prompt_dict, SamplingParams(**params), RequestOptions(retain_cache=rng.random() < 0.2)
            )
        failed.update(collect(outputs, engine.step()))
        if engine.num_steps % 4 == 0:
            check(memory)  # type: ignore[arg-type]
        if rng.random() < 0.05:
            if "pin" in memory.pins.names():
                memory.unpin("pin")
            else:
                memory.pin("pin", memory.chain(shared[: rng.randrange(4, 20)], Namespace()))
    memory.reset_prefix_cache()
    assert memory.usage().used == 0, "something is held by nobody"
    for request_id, (prompt, params, own_seed) in asked.items():
        if request_id not in failed:
            expected = alone(specs, prompt, params, own_seed)
            assert outputs[request_id] == expected, f"request {request_id} has other tokens than alone"
    # What was closed is told with the next plan.
    failures.end()
    engine.add_request("last", {"prompt_token_ids": [1]}, SamplingParams(max_tokens=1, detokenize=False))
    engine.step()
    assert engine.executor.num_open == 1, "the data plane keeps sequences that have ended"  # type: ignore[attr-defined]
    return len(asked) - len(failed), failures.count, failures.num_lost_copies


@pytest.mark.parametrize("name", ["unequal blocks, host", "states, host"])
def test_random_steps_fail_while_the_next_one_is_in_flight(name: str) -> None:
    """At their launch, or when their tokens are read: then what was launched behind them is worth nothing."""
    num_good, num_failures, num_lost = run_worlds(name, range(3), is_async=True)
    assert num_good > 24
    assert num_failures > 6
    assert num_lost > 3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "host" in name else pytest.mark.slow) for name in WORLDS]
)
def test_random_steps_fail_where_drafts_rest(name: str) -> None:
    """Steps with drafts fail, and plans that were made ahead of failed steps are withdrawn."""
    with short_rests():
        num_good, num_failures, _ = run_worlds(name, range(3), is_async=True, drafts="resting")
    assert num_good > 24
    assert num_failures > 6


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if "host" in name else pytest.mark.slow) for name in WORLDS]
)
def test_random_steps_fail_and_no_later_request_has_other_tokens(name: str) -> None:
    num_good, num_failures, num_lost = run_worlds(name, range(5))
    assert num_good > 40
    assert num_failures > 10
    assert num_lost > 5


@pytest.mark.parametrize(
    "is_async",
    [
        pytest.param(False, marks=pytest.mark.exhaustive, id="in order"),
        pytest.param(True, marks=pytest.mark.slow, id="ahead"),
    ],
)
@pytest.mark.parametrize("name", WORLDS)
def test_many_random_steps_fail(name: str, is_async: bool) -> None:
    num_good, _, num_lost = run_worlds(name, range(2, 42), is_async=is_async)
    assert num_good > 400
    assert num_lost > 100


def run_worlds(name: str, seeds: range, **options: Any) -> list[int]:
    return list(map(sum, zip(*(run_world(name, seed, 30, **options) for seed in seeds), strict=True)))


STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "
PROMPTS = [STORY + end for end in ("Then", "But the kite", "The next day the fox", "Her friend")] + [
    f"{name} lived in a house by the sea. One day {name} saw a boat, and {name} said: what a fine boat that is!"
    for name in ("Tom", "Anna", "Ben", "Lily")
]


@pytest.mark.parametrize("is_async", [False, True], ids=["step-by-step", "asynchronous"])
@pytest.mark.parametrize("has_disk", [False, True])
def test_steps_of_the_real_data_plane_fail_at_random_copies(has_disk: bool, is_async: bool, tmp_path: Path) -> None:
    """With a host tier, swaps and a disk; and what was recorded runs again."""
    rng, log = random.Random(4), tmp_path / "memory.log"
    options: dict[str, Any] = {"num_threads": 1, "max_model_len": 128, "block_size": 4}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with closing(LLM(**options)) as reference:
        expected = {prompt: reference.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS}
    if has_disk:
        options["prefix_cache_dir"] = str(tmp_path / "disk")
    # A host tier that is too small for all, so that the disk has the rest.
    options |= {"swap_space": 1 << (17 if has_disk else 20), "async_scheduling": is_async}
    llm = LLM(**options, num_kv_blocks=36 if has_disk else 46, preemption_mode="swap", record_memory=str(log))
    with closing(llm):
        failures = Failures(rng, 0.02, 0.3)
        executor = llm.engine.executor
        blocks = executor._runner._blocks  # type: ignore[attr-defined]
        llm.engine.executor = FailingExecutor(executor, blocks, failures)
        stores = llm.engine._disk_prefetch
        num_good = 0
        for _ in range(30 if has_disk else 12):
            outputs = llm.generate(rng.sample(PROMPTS, 3), params, use_tqdm=False)
            for output in outputs:
                if output.error is None:
                    num_good += 1
                    assert output.prompt is not None
                    assert tokens_of(output) == tokens_of(expected[output.prompt])
            if stores is not None and stores._disk.disk is not None:
                stores._disk.disk.flush()  # else the number of hits depends on the disk's speed
        assert num_good > 5
        assert failures.count > 5
        assert failures.num_lost_copies > 5
        check(llm.engine.scheduler.memory)
        assert not has_disk or (llm.stats.disk is not None and llm.stats.disk.num_hits > 0)
        assert stores is None or not stores._disk._fetched, "blocks that were read are kept for no copy"
        # The runner knows nobody once the next plan has told it who ended.
        failures.end()
        llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)
        assert len(executor._runner._builder.tables) == 1  # type: ignore[attr-defined]
    with log.open(encoding="utf-8") as lines:
        report = replay(lines, check_every=50)
    assert report.fault is None
    # So are those of a step that was launched behind the one that failed.
    assert failures.count <= report.num_commands["discard_copies"] <= (1 + is_async) * failures.count


def test_a_failed_step_costs_a_later_request_its_hit_and_no_token() -> None:
    """Blocks are demoted by the step that fails, and nothing is copied."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first, second = ({"prompt_token_ids": list(range(*bounds))} for bounds in ((10, 58), (300, 372)))
    with closing(LLM("bundled", max_model_len=96, block_size=8, num_kv_blocks=12, swap_space=1 << 22)) as llm:
        expected = tokens_of(llm.generate(first, params, use_tqdm=False)[0])
        executor, honest = llm.engine.executor, llm.engine.executor.launch

        def fails(plan: StepPlan) -> Any:
            assert plan.ops.copies
            executor.launch = honest  # type: ignore[method-assign]
            return LaunchedStep.failed(WorkerError("no power"))

        executor.launch = fails  # type: ignore[method-assign]
        assert llm.generate(second, params, use_tqdm=False)[0].error is not None
        assert tokens_of(llm.generate(first, params, use_tqdm=False)[0]) == expected


@pytest.mark.parametrize("is_async", [False, True], ids=["step-by-step", "asynchronous"])
def test_nothing_is_saved_after_a_failed_step(is_async: bool, tmp_path: Path) -> None:
    """Also where the step was still in flight: the blocks that it was to load have the content of others."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    first, second, other = ({"prompt_token_ids": list(range(*bounds))} for bounds in ((10, 58), (300, 372), (600, 612)))
    options: dict[str, Any] = {"max_model_len": 96, "block_size": 8, "num_kv_blocks": 16, "num_threads": 1}
    options |= {"swap_space": 1 << 22, "prefix_cache_dir": str(tmp_path), "async_scheduling": is_async}
    with closing(LLM(**options)) as llm:
        expected, _ = (tokens_of(llm.generate(prompt, params, use_tqdm=False)[0]) for prompt in (first, second))
        llm.engine.add_request("other", other, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        for _ in range(2):
            llm.engine.step()

        def fails(plan: StepPlan) -> Any:
            assert plan.ops.copies, "the first prompt is on the host"
            raise WorkerError("no power")

        llm.engine.executor._runner.execute = fails  # type: ignore[attr-defined]
        llm.engine.add_request("first", first, params)
        llm.engine.step()
        assert ("first" in llm.engine.outputs) == is_async, "the failed step is in flight, or not"
    with closing(LLM(**options)) as llm:
        assert tokens_of(llm.generate(first, params, use_tqdm=False)[0]) == expected
