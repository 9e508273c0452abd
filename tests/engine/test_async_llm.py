"""The asynchronous interface, on the bundled model: streams, cancellation, bounded queue, draining, death."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from quire import AsyncLLM, SamplingParams
from quire.errors import InvalidParameter, QueueFull, RequestError, WorkerError
from tests.engine.test_llm import STORIES, Failing, greedy


def load(**options: Any) -> AsyncLLM:
    """Load the bundled model with a small pool on one thread."""
    return AsyncLLM.from_options(**({"num_kv_blocks": 128, "num_threads": 1, "max_model_len": 512} | options))


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop of its own, bounded in time."""

    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), timeout=120))

    run.__signature__ = inspect.signature(test)  # type: ignore[attr-defined]
    run.__name__ = test.__name__
    return run


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    """Return an engine; nothing may be left in it."""
    llm = load()
    yield llm
    assert asyncio.run(idle(llm))
    llm.shutdown()


async def idle(llm: AsyncLLM) -> bool:
    """Wait until no block is used, for a bounded number of turns."""
    for _ in range(6000):
        if llm.usage().used == 0 and llm.health().num_running == llm.health().num_waiting == 0:
            return True
        await asyncio.sleep(0.01)
    return False


async def text_of(llm: AsyncLLM, prompt: Any, params: SamplingParams, **options: Any) -> str:
    """Return the first sample's text."""
    return "".join([delta.outputs[0].text async for delta in llm.generate(prompt, params, **options)])


@scenario
async def test_streams_run_side_by_side_and_add_up(llm: AsyncLLM) -> None:
    alone = [await text_of(llm, story, greedy()) for story in STORIES]
    together = await asyncio.gather(*(text_of(llm, story, greedy()) for story in STORIES))
    assert list(together) == alone


@scenario
async def test_a_slow_reader_finds_one_output_with_all_that_it_missed(llm: AsyncLLM) -> None:
    whole = await text_of(llm, STORIES[0], greedy(logprobs=2))
    first = None
    while first is None or first.finished:  # on a busy machine, the first output may have all
        stream = llm.generate(STORIES[0], greedy(logprobs=2))
        first = await anext(stream)
    assert await idle(llm)
    await llm.inspect(lambda _: None)  # the last step has freed its blocks, and has sent its output only now
    (rest,) = [output async for output in stream]
    assert first.outputs[0].text + rest.outputs[0].text == whole
    assert rest.finished
    assert len(rest.outputs[0].token_ids) == len(rest.outputs[0].logprobs or ()) > 1


@scenario
async def test_a_cancelled_task_frees_its_blocks(llm: AsyncLLM) -> None:
    endless = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)

    async def consume() -> None:
        async for _ in llm.generate(STORIES[0], endless):
            pass

    task = asyncio.create_task(consume())
    while llm.usage().used == 0:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await idle(llm)


@scenario
async def test_a_closed_iterator_frees_its_blocks_and_spares_the_others(llm: AsyncLLM) -> None:
    expected = await text_of(llm, STORIES[1], greedy(60))
    other = asyncio.create_task(text_of(llm, STORIES[1], greedy(60)))
    stream = llm.generate(STORIES[0], SamplingParams(max_tokens=None, ignore_eos=True, n=3, seed=1))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert await other == expected


@scenario
async def test_a_refused_request_raises_at_the_first_item_and_harms_nobody(llm: AsyncLLM) -> None:
    other = asyncio.create_task(text_of(llm, STORIES[1], greedy(30)))
    with pytest.raises(InvalidParameter):
        await anext(llm.generate([-1], greedy()))
    stream = llm.generate(STORIES[0], greedy(200), request_id="mine")
    await anext(stream)
    with pytest.raises(InvalidParameter, match="request_id"):
        await anext(llm.generate(STORIES[0], greedy(), request_id="mine"))
    assert [delta async for delta in stream][-1].finished
    assert await other


@scenario
async def test_a_priority_is_refused_where_the_policy_has_none(llm: AsyncLLM) -> None:
    for priority in (1, -1):
        with pytest.raises(
            InvalidParameter, match="priority must be 0 under the scheduling policy 'fcfs', got"
        ) as caught:
            await text_of(llm, STORIES[0], greedy(1), priority=priority)
        assert (caught.value.field, caught.value.value) == ("priority", priority)


@scenario
async def test_a_priority_is_refused_before_a_slot_is_reserved_and_a_text_is_read() -> None:
    llm = load(max_queue_len=1)
    with llm.reserve(1), pytest.raises(InvalidParameter, match="priority"):
        await text_of(llm, STORIES[0], greedy(1), priority=1)
    with pytest.raises(InvalidParameter, match="priority"):
        await text_of(llm, [-1], greedy(1), priority=1)
    llm.shutdown()


@scenario
async def test_special_tokens_are_added_or_not(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidParameter, match="add_special_tokens must be true or false, got 'yes'"):
        await text_of(llm, STORIES[0], greedy(1), add_special_tokens="yes")


@scenario
async def test_the_queue_is_bounded_before_any_work() -> None:
    llm = load(max_num_seqs=1, max_queue_len=2)
    endless = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
    running = llm.generate(STORIES[0], endless)
    await anext(running)
    with llm.reserve(2):
        with pytest.raises(QueueFull) as refusal:
            llm.reserve(1)
        assert refusal.value.retry_after_s > 0
        with pytest.raises(QueueFull):
            await anext(llm.generate(STORIES[1], greedy()))
    with llm.reserve(1) as place:
        waiting = asyncio.create_task(text_of(llm, STORIES[1], greedy(), place=place))
        await asyncio.sleep(0)
        await running.aclose()  # type: ignore[attr-defined]
        assert await waiting
    llm.shutdown()


@scenario
async def test_draining_finishes_what_runs_and_refuses_the_rest() -> None:
    llm = load()
    running = asyncio.create_task(text_of(llm, STORIES[0], greedy(40)))
    while llm.health().num_running == 0:
        await asyncio.sleep(0.005)
    draining = asyncio.create_task(llm.drain(30.0))
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="shutting down"):
        await anext(llm.generate(STORIES[1], greedy()))
    assert await draining
    assert await running
    llm.shutdown()
    llm.shutdown()
    assert not llm.health().is_alive


@scenario
async def test_shutdown_tells_the_streams() -> None:
    llm = load()
    stream = llm.generate(STORIES[0], SamplingParams(max_tokens=None, ignore_eos=True, seed=1))
    await anext(stream)
    llm.shutdown()
    with pytest.raises(WorkerError):
        async for _ in stream:
            pass


@scenario
async def test_a_dead_data_plane_is_told_to_every_task_and_shows_in_health() -> None:
    llm = load()
    llm._engine.executor = Failing(llm._engine.executor, set(range(10_000)))
    errors = []
    for _ in range(2):
        deltas = [delta async for delta in llm.generate(STORIES[0], greedy())]
        errors.append(deltas[-1].error)
    assert all("no power" in str(error) for error in errors)
    with pytest.raises(WorkerError):
        await anext(llm.generate(STORIES[0], greedy()))
    for _ in range(500):
        if not llm.health().is_alive:
            break
        await asyncio.sleep(0.01)
    assert not llm.health().is_alive
    with pytest.raises(WorkerError, match="in a row"):
        await anext(llm.generate(STORIES[0], greedy()))


@scenario
async def test_metrics_count_what_happened() -> None:
    llm = load()
    await text_of(llm, STORIES[0], greedy(5, ignore_eos=True))
    page = llm.metrics.render().decode()
    assert 'vllm:generation_tokens_total{engine="0",model_name="bundled"} 5.0' in page
    assert 'finished_reason="length"' in page
    stream = llm.generate(STORIES[0], greedy(400, ignore_eos=True))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert await idle(llm)
    page = llm.metrics.render().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="bundled"} 0.0' in page
    assert 'finished_reason="abort"' in page
    llm.shutdown()


@scenario
async def test_a_request_that_cannot_even_start_is_its_own_affair(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = llm.generate(STORIES[1], greedy(30))
    assert (await anext(other)).outputs  # it has started before the others fail
    for name in (["a"], 7, ""):
        with pytest.raises(InvalidParameter, match="request_id"):
            await anext(llm.generate(STORIES[0], greedy(), request_id=name))  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="sampling_params"):
        await anext(llm.generate(STORIES[0], {"temperature": 0.0}))  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.requests, "_seed", lambda number: number // 0)
        with pytest.raises(ZeroDivisionError):
            await anext(llm.generate(STORIES[0], greedy()))
    assert [delta async for delta in other][-1].finished
    assert llm.health().is_alive


@scenario
async def test_who_asks_for_what_makes_the_engine_die_is_told_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        """As libraries in Rust raise."""

    def panics(*_: Any, **__: Any) -> None:
        raise Panic

    llm = load()
    try:
        monkeypatch.setattr(llm._engine, "add_request", panics)
        with pytest.raises(WorkerError, match="died"):
            await text_of(llm, STORIES[0], greedy())
        while llm.health().is_alive:
            await asyncio.sleep(0.01)
        assert llm.has_failed
    finally:
        llm.shutdown()


@scenario
async def test_leaving_a_request_whose_name_is_none_spares_the_engine(llm: AsyncLLM) -> None:
    names: list[Any] = [[], 5, ""]
    for wrong in names:
        refused = asyncio.create_task(text_of(llm, STORIES[0], greedy(), request_id=wrong))
        await asyncio.sleep(0)
        refused.cancel()
        with pytest.raises((InvalidParameter, asyncio.CancelledError)):
            await refused
    assert await text_of(llm, STORIES[0], greedy(1))


@scenario
async def test_cancelling_a_request_with_anothers_name_spares_the_other(llm: AsyncLLM) -> None:
    owner = llm.generate(STORIES[0], greedy(60, ignore_eos=True), request_id="shared")
    await anext(owner)
    double = asyncio.create_task(text_of(llm, STORIES[1], greedy(), request_id="shared"))
    await asyncio.sleep(0)
    double.cancel()
    with pytest.raises(asyncio.CancelledError):
        await double
    assert [delta async for delta in owner][-1].finished


@scenario
async def test_a_dead_engine_says_so_whatever_its_queue_holds() -> None:
    llm = load(max_queue_len=2)
    llm.shutdown()
    llm.submitter.is_draining = False  # as if it had died
    for _ in range(5):
        with pytest.raises(WorkerError):
            await anext(llm.generate(STORIES[0], greedy()))
    assert llm.health().num_waiting == 0


@scenario
async def test_leaving_clients_are_not_counted_as_waiting() -> None:
    llm = load(max_queue_len=3)
    streams = [llm.generate(STORIES[0], greedy(300, ignore_eos=True)) for _ in range(3)]
    for stream in streams:
        await anext(stream)
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    assert llm.health().num_waiting == 0
    with llm.reserve(3):
        pass
    assert await idle(llm)
    llm.shutdown()


# `weakref` registers its callback when the first module is imported that needs it, and the last one comes first.
LEAVES_A_RUNNING_ENGINE = """
import atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if "engine" in thread.name]))
import asyncio
from tests.engine.test_async_llm import STORIES, greedy, load
llm = load()
async def first_delta():
    print(await anext(llm.generate(STORIES[0], greedy(400, ignore_eos=True))) is not None)
    asyncio.get_running_loop().stop()
loop = asyncio.new_event_loop()
task = loop.create_task(first_delta())
loop.run_forever()
"""


@pytest.mark.slow
def test_a_program_may_end_without_shutdown() -> None:
    """A thread in an operator of torch would abort the process when the interpreter is finalised under it."""
    done = subprocess.run([sys.executable, "-c", LEAVES_A_RUNNING_ENGINE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["True", "[]", ""]), done.stderr
