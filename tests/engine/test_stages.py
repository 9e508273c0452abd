"""A model in stages, each a process: tokens, features, refusals, and the end of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputs
from quire.config import EngineConfig, ParallelConfig
from quire.distributed.torchrun import TorchrunPlace, check_size
from quire.errors import ConfigError, RankFailed, WorkerError
from tests.distributed.engines import compare_every_step
from tests.distributed.in_threads import native_library
from tests.engine.test_kv_events import EVENTS
from tests.engine.test_ranks import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    WAIT_S,
    check_pins_and_events,
    children,
    serve_until_it_fails,
    texts,
)


def start(size: int = 2, **options: Any) -> LLM:
    return LLM("bundled", pipeline_parallel_size=size, **{"num_kv_blocks": 40, **OPTIONS, **options})


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLM, LLM]]:
    """Return an engine of one process and one of two stages, both with so little memory that some are preempted."""
    native_library()
    options: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "num_kv_blocks": 20,
        "swap_space": 1 << 20,
        "pin_limit": 0.1,
    }
    with LLM("bundled", **{**OPTIONS, **options}) as one, start(**options, kv_events_config=EVENTS) as two:
        compare_every_step(two)
        yield one, two


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1, min_tokens=3), id="logprobs"),
        *(
            pytest.param(params, id=name, marks=pytest.mark.slow)
            for name, params in {
                "samples": SamplingParams(
                    temperature=1.0, seed=5, n=3, max_tokens=40, repetition_penalty=1.2, logprobs=2, top_p=0.9
                ),
                "beams": SamplingParams(beam_width=3, n=2, max_tokens=12),
                "grammar": SamplingParams(
                    temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-c]{3} [0-9]{4}")
                ),
                "stop strings": SamplingParams(temperature=0.0, max_tokens=60, stop=("the", ".")),
            }.items()
        ),
    ],
)
def test_two_stages_give_what_one_process_gives(params: SamplingParams, pair: tuple[LLM, LLM]) -> None:
    one, two = pair
    assert texts(two, params) == texts(one, params)
    # Prefixes are cached now.
    assert texts(two, params) == texts(one, params)


def test_pins_are_repeated_and_events_come_from_rank_0(pair: tuple[LLM, LLM]) -> None:
    check_pins_and_events(pair)


def test_requests_that_are_aborted_in_flight_leave_nothing(pair: tuple[LLM, LLM]) -> None:
    one, two = pair
    for _ in range(3):
        stream: Any = two.stream(PROMPTS, GREEDY)
        next(stream)
        stream.close()
    two.reset_prefix_cache()
    one.reset_prefix_cache()
    assert texts(two, GREEDY) == texts(one, GREEDY)
    assert two.usage().used == 0


def test_each_rank_loads_its_own_layers_alone(pair: tuple[LLM, LLM]) -> None:
    one, two = (llm.engine.executor for llm in pair)
    whole: Any = one
    last: Any = two
    names = last._inner._runner._decoder.weights.slots
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    all_layers = {name.split(".")[1] for name in whole._runner._decoder.weights.slots if name.startswith("layers.")}
    assert 0 < len(layers) < len(all_layers)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_that_need_no_model(method: str) -> None:
    native_library()
    prompts = [prompt * 4 for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    with LLM("bundled", num_kv_blocks=80, **OPTIONS) as one:
        expected = [output.outputs[0].token_ids for output in one.generate(prompts, params, use_tqdm=False)]
    config = {"method": method, "num_speculative_tokens": 4}
    with start(3, num_kv_blocks=80, speculative_config=config) as three:
        compare_every_step(three)
        for _ in range(3):
            found = [output.outputs[0].token_ids for output in three.generate(prompts, params, use_tqdm=False)]
            assert found == expected
        assert three.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_three_stages(backend: str, microbatches: int) -> None:
    native_library()
    with LLM("bundled", num_kv_blocks=40, **OPTIONS) as one:
        expected = texts(one, GREEDY)
    with start(3, all_reduce_backend=backend, pipeline_microbatches=microbatches) as three:
        compare_every_step(three)
        assert texts(three, GREEDY) == expected


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"speculative_config": {"method": "mtp"}}, "speculative_method"),
        (
            {"prefix_cache_dir": "/folder", "prefix_cache_write_policy": "write_through"},
            "prefix_cache_write_policy",
        ),
        ({"prefix_cache_url": "http://host:8000"}, "prefix_cache_url"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel"),
        ({"cpu_bind": "0|1|2"}, "cpu_bind"),
        ({"cpu_bind": "0|1", "num_threads": 2}, "num_threads"),
        ({"device": "cuda"}, "device"),
        ({"max_inter_token_ms": 50.0}, "max_inter_token_ms"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size"),
        ({"pipeline_parallel_size": 65}, "pipeline_parallel_size"),
        ({"pipeline_parallel_size": True}, "pipeline_parallel_size"),
        ({"pipeline_parallel_size": 9, "tensor_parallel_size": 8}, "pipeline_parallel_size"),
        ({"pipeline_microbatches": 0}, "pipeline_microbatches"),
        ({"pipeline_microbatches": 65}, "pipeline_microbatches"),
    ],
)
def test_options_that_stages_do_not_serve_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as refused:
        EngineConfig.from_options(**{"pipeline_parallel_size": 2, **options})
    assert refused.value.field == field


def test_more_stages_than_layers_are_refused_and_leave_no_process() -> None:
    before = children()
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size must be at most .* got 64") as refused:
        start(64)
    assert refused.value.field == "pipeline_parallel_size"
    assert children() == before


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"pipeline_parallel_size": 2}, r"^pipeline_parallel_size must be .* has started \(4\), got 2$"),
        (
            {"pipeline_parallel_size": 3, "tensor_parallel_size": 2},
            r"^tensor_parallel_size x pipeline_parallel_size must be .* has started \(4\), got 2 x 3$",
        ),
    ],
)
def test_torchrun_must_have_started_as_many(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_size(ParallelConfig(**sizes), TorchrunPlace(0, 4, 0, 1, "host"))
    assert refused.value.field == "pipeline_parallel_size"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
@pytest.mark.parametrize(("size", "stage"), [(2, 0), (3, 0), (3, 1)])
@pytest.mark.parametrize("when", ["stepping", "idle"])
def test_a_killed_rank_ends_the_engine_with_its_name(backend: str, size: int, stage: int, when: str) -> None:
    native_library()
    llm = start(size, all_reduce_backend=backend)
    assert llm.engine.ranks is not None
    processes = llm.engine.ranks.process_ids
    stream: Any = llm.stream(PROMPTS, GREEDY)
    next(stream)
    if when == "idle":
        stream.close()
    os.kill(processes[stage], signal.SIGKILL)
    with pytest.raises(RankFailed, match=rf"rank {stage + 1} \(process \d+\) was ended by SIGKILL") as failed:
        serve_until_it_fails(llm, stream)
    assert failed.value.rank == stage + 1
    with pytest.raises(WorkerError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()
    assert not {*children()} & {*processes}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_torchrun_starts_the_stages(backend: str) -> None:
    native_library()
    program = (
        "from quire import LLM, SamplingParams\n"
        f"with LLM('bundled', pipeline_parallel_size=2, num_kv_blocks=40, all_reduce_backend={backend!r},"
        f" **{OPTIONS!r}) as llm:\n"
        f"    outputs = llm.generate({PROMPTS!r}, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))\n"
        "    print([output.outputs[0].token_ids for output in outputs], llm.engine.ranks.group.transport.name)\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run([*command, sys.executable, "-c", program], capture_output=True, text=True, timeout=5 * WAIT_S)
    assert done.returncode == 0, done.stderr
    with LLM("bundled", num_kv_blocks=40, **OPTIONS) as one:
        expected = [output.outputs[0].token_ids for output in one.generate(PROMPTS, GREEDY, use_tqdm=False)]
    name = "gloo" if backend == "gloo" else "shared memory"
    assert done.stdout.strip().endswith(f"{expected} {name}")
