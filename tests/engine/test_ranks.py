"""Several processes that share a model: tokens, features, refusals, and the end of a rank."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from quire.config import EngineConfig, ParallelConfig
from quire.distributed.torchrun import TorchrunPlace, check_size, torchrun_place
from quire.errors import ConfigError, InvalidParameter, RankFailed, UnsupportedFeature, WorkerError
from tests.distributed.engines import compare_every_step
from tests.distributed.in_threads import native_library
from tests.engine.test_kv_events import EVENTS
from tests.kvevents.test_publisher import Client
from tests.memory.test_kv_events import Consumer, published

OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": "float32", "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ONE = SamplingParams(temperature=0.0, max_tokens=1)
PROMPTS = ["Once upon a time", "The old sailor", "Tom found a red kite and Once upon a time", "A"]
WAIT_S = 120


def start(size: int = 2, **options: Any) -> LLM:
    return LLM("bundled", tensor_parallel_size=size, **{"num_kv_blocks": 40, **OPTIONS, **options})


def texts(llm: LLM, params: SamplingParams) -> list[list[str]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [[sample.text for sample in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLM, LLM]]:
    """Return an engine of one process and one of two ranks, both with so little memory that sequences are preempted."""
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
        GREEDY,
        SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, repetition_penalty=1.2, logprobs=2, top_p=0.9),
        SamplingParams(beam_width=3, n=2, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-c]{3} [0-9]{4}")),
        SamplingParams(temperature=0.0, max_tokens=60, stop=("the", ".")),
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1, min_tokens=3),
    ],
    ids=["greedy", "samples", "beams", "grammar", "stop strings", "prompt logprobs"],
)
def test_two_ranks_give_what_one_process_gives(params: SamplingParams, pair: tuple[LLM, LLM]) -> None:
    one, two = pair
    assert texts(two, params) == texts(one, params)
    # Prefixes are cached now.
    assert texts(two, params) == texts(one, params)


@pytest.mark.parametrize("quantization", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_ranks_of_a_quantised_model_give_the_bits_of_one_process(quantization: str) -> None:
    native_library()
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2, prompt_logprobs=1)

    def results(llm: LLM) -> list[Any]:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        return [(each.outputs[0].token_ids, each.outputs[0].logprobs, each.prompt_logprobs) for each in outputs]

    with LLM("bundled", quantization=quantization, **OPTIONS) as one:
        expected = results(one)
    with start(quantization=quantization) as two:
        assert results(two) == expected


def test_pins_are_repeated_and_events_come_from_rank_0(pair: tuple[LLM, LLM]) -> None:
    check_pins_and_events(pair)


def check_pins_and_events(pair: tuple[LLM, LLM]) -> None:
    """Check that a prefix is pinned on one process and on ranks, and that a consumer of events knows their cache."""
    prompt = list(range(10, 43))
    for llm in pair:
        assert llm.pin_prefix("system", prompt) == 32
        # More than the pool has.
        llm.generate([[number] * 100 for number in (50, 51, 52)], ONE, use_tqdm=False)
        (output,) = llm.generate([prompt], ONE, use_tqdm=False)
        assert output.num_cached_tokens == 32
        assert llm.usage().used == 2
        llm.unpin_prefix("system")
    two = pair[1]
    assert two.usage().used == 0
    source = two.engine.kv_events
    assert source is not None
    consumer = Consumer()
    client = Client(source._publisher)
    try:
        client.subscribe()
        source.request_all()
        two.generate(PROMPTS, ONE, use_tqdm=False)  # digests of the ranks' block tables are compared in each step
        while client.batches.poll(200):
            consumer.apply(client.receive()[1])
    finally:
        client.close()
    assert consumer.blocks == set(published(two.engine.scheduler.memory))


def test_requests_that_ranks_do_not_serve_are_refused_alone(pair: tuple[LLM, LLM]) -> None:
    one, two = pair

    class Own:
        def num_draws(self, _: Any) -> int:
            return 1

        def advance(self, _: Any, token_ids: Any) -> Any:
            return token_ids

    with pytest.raises(UnsupportedFeature, match="every rank plans for itself") as refused:
        two.generate(PROMPTS[0], SamplingParams(strategy=Own()), use_tqdm=False)  # type: ignore[arg-type]
    assert refused.value.field == "strategy"
    with pytest.raises(InvalidParameter):
        two.generate(PROMPTS[0], SamplingParams(n=9), use_tqdm=False)
    stream: Any = two.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()  # the others are aborted
    two.reset_prefix_cache()
    one.reset_prefix_cache()
    assert texts(two, GREEDY) == texts(one, GREEDY)
    assert two.usage().used == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_that_need_no_model(method: str) -> None:
    native_library()
    prompts = [prompt * 4 for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    config = {"method": method, "num_speculative_tokens": 4}
    with LLM("bundled", num_kv_blocks=80, **OPTIONS) as one:
        expected = [output.outputs[0].token_ids for output in one.generate(prompts, params, use_tqdm=False)]
    with start(num_kv_blocks=80, speculative_config=config) as two:
        compare_every_step(two)
        for _ in range(3):
            found = [output.outputs[0].token_ids for output in two.generate(prompts, params, use_tqdm=False)]
            assert found == expected
        assert two.stats.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prefix_cache_url": "redis://host:6379"}, "prefix_cache_url"),
        ({"device": "cpu", "all_reduce_backend": "nccl"}, "all_reduce_backend"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 65}, "tensor_parallel_size"),
        ({"tensor_parallel_size": True}, "tensor_parallel_size"),
        ({"all_reduce_backend": "mpi"}, "all_reduce_backend"),
        ({"distributed_timeout_s": 0}, "distributed_timeout_s"),
        ({"enable_expert_parallel": 1}, "enable_expert_parallel"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 1}, "enable_expert_parallel"),
    ],
)
def test_options_that_ranks_do_not_serve_are_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as refused:
        EngineConfig.from_options(**{"tensor_parallel_size": 2, **options})
    assert refused.value.field == field


def test_torchrun_says_the_place() -> None:
    given = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert TorchrunPlace.of(given) == TorchrunPlace(3, 4, 0, 1, "host")
    local = {**given, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert TorchrunPlace.of(local) == TorchrunPlace(3, 4, 1, 2, "host")
    assert TorchrunPlace.of({}) is None
    assert TorchrunPlace.of({**given, "WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigError, match="RANK"):
        TorchrunPlace.of({**given, "RANK": "first"})


def test_torchrun_must_have_started_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert torchrun_place(ParallelConfig()) is None
    config = ParallelConfig(tensor_parallel_size=2)
    place = torchrun_place(config)
    assert place is not None
    with pytest.raises(ConfigError, match=r"has started \(4\), got 2"):
        check_size(config, place)


def test_a_model_that_ranks_cannot_share_is_refused_and_leaves_no_process() -> None:
    before = children()
    with pytest.raises(ConfigError, match="must divide the") as refused:
        start(7)
    assert refused.value.field == "tensor_parallel_size"
    assert children() == before


def test_experts_of_a_model_without_any_are_not_divided() -> None:
    with pytest.raises(ConfigError, match="divides experts, and bundled has none") as refused:
        start(enable_expert_parallel=True)
    assert refused.value.field == "enable_expert_parallel"


def children() -> list[int]:
    """Return the processes of ranks that this process has started and that still run."""
    found = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "rank_process" in line]


def serve_until_it_fails(llm: LLM, stream: Iterator[Any]) -> None:
    """Go on with a stream, then serve others."""
    for _ in stream:
        pass
    for _ in range(1000):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("backend", ["shared_memory", pytest.param("gloo", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["stepping", pytest.param("idle", marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_engine_with_its_name(backend: str, when: str) -> None:
    check_a_killed_rank(when, all_reduce_backend=backend)


def check_a_killed_rank(when: str, **options: Any) -> None:
    """Kill a rank of two while the engine steps, or is idle: its end is told with its name, and no process is left."""
    native_library()
    before = {*children()}
    llm = start(**options)
    (rank,) = {*children()} - before
    stream: Any = llm.stream(PROMPTS, GREEDY)
    next(stream)
    if when == "idle":
        stream.close()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) was ended by SIGKILL") as failed:
        serve_until_it_fails(llm, stream)
    assert failed.value.rank == 1
    with pytest.raises(WorkerError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()
    assert not {*children()} - before


@pytest.mark.slow
def test_streams_of_an_idle_or_busy_engine_end_with_the_error() -> None:
    native_library()

    async def main() -> None:
        before = {*children()}
        llm = await asyncio.to_thread(lambda: AsyncLLM.from_options("bundled", tensor_parallel_size=2, **OPTIONS))
        (rank,) = {*children()} - before
        generator = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
        await anext(generator)
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1"):
            async for _ in generator:
                pass
        with pytest.raises(WorkerError, match="rank 1"):
            await anext(llm.generate(PROMPTS[0], GREEDY))
        await asyncio.to_thread(llm.shutdown)

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


@pytest.mark.slow
def test_an_engine_that_waits_for_requests_notices_the_end_of_a_rank() -> None:
    native_library()
    before = {*children()}
    llm = AsyncLLM.from_options("bundled", tensor_parallel_size=2, **OPTIONS)
    assert llm._engine.ranks is not None
    thread = llm._thread._thread
    (rank,) = {*children()} - before
    os.kill(rank, signal.SIGKILL)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert isinstance(llm._thread.failure, RankFailed)
    llm.shutdown()


@pytest.mark.slow
def test_ranks_end_with_the_process_of_the_engine() -> None:
    """The engine's process is killed, so that it cannot say goodbye."""
    native_library()
    program = (
        "import os, signal, subprocess\n"
        "from quire import LLM\n"
        f"llm = LLM('bundled', tensor_parallel_size=2, num_kv_blocks=40, **{OPTIONS!r})\n"
        "print(llm.engine.ranks._processes[0].pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S)
    rank = int(done.stdout)
    # Its own pipe to this process is closed when it has ended; what it wrote is complete then.
    for _ in range(WAIT_S * 10):
        try:
            os.kill(rank, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{rank}/stat", encoding="ascii") as stat:
            if stat.read().split()[2] == "Z":
                return
        threading.Event().wait(0.1)
    pytest.fail(f"rank 1 (process {rank}) still runs")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_torchrun_starts_the_ranks(backend: str) -> None:
    native_library()
    program = (
        "from quire import LLM, SamplingParams\n"
        f"with LLM('bundled', tensor_parallel_size=2, num_kv_blocks=40, all_reduce_backend={backend!r},"
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


@pytest.mark.slow
def test_an_error_while_another_rank_loads_is_that_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    native_library()
    monkeypatch.setattr("quire.engine.startup.start.check_shared", lambda _: None)
    before = children()
    with pytest.raises(ConfigError, match="query heads of layer 0, got 5"):
        start(5)
    assert children() == before
