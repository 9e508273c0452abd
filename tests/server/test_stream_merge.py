"""Merging outputs, the client's disconnect and the server's stop, on a real event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import InvalidParameter
from quire.server.admission.stream_merge import ClientGone, Delta, StreamMerger
from quire.server.requests.errors import ApiError, stopping

Receive = Callable[[], Awaitable[Any]]


def output(name: str, *, finished: bool = False) -> RequestOutput:
    return RequestOutput(name, None, [1], [], finished=finished)


def delta(token_id: int, *, finished: bool = False) -> RequestOutput:
    return RequestOutput("a", None, [1], [CompletionOutput(0, text="x", token_ids=[token_id])], finished=finished)


class Source:
    """The request of a prompt: delivers what it is given, once it is submitted, and records whether it was ended."""

    def __init__(self) -> None:
        self.is_ended = False
        self._early: list[RequestOutput | Exception] = []
        self._deliver: Callable[[RequestOutput | Exception], None] = self._early.append

    def put(self, item: RequestOutput | Exception) -> None:
        self._deliver(item)

    def submit(self, deliver: Callable[[RequestOutput | Exception], None]) -> Callable[[], None]:
        def end() -> None:
            self.is_ended = True

        self._deliver = deliver
        for item in self._early:
            asyncio.get_running_loop().call_soon(deliver, item)
        return end


async def never() -> Any:
    await asyncio.Event().wait()


async def added() -> bool:
    return True


def deltas(
    merger: StreamMerger,
    sources: list[Source],
    receive: Receive = never,
    has_added: Callable[[], Awaitable[bool]] = added,
    take: Callable[[int, RequestOutput], bool] | None = None,
) -> AsyncGenerator[list[Delta], None]:
    """Yield the deltas of sources."""

    async def submit(idx: int) -> Callable[[], None]:
        return sources[idx].submit(partial(merger.put, idx))

    return merger.deltas(len(sources), submit, receive, has_added, take)


async def read(
    merger: StreamMerger,
    sources: list[Source],
    receive: Receive,
    got: list[Delta],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Read all deltas of a merger, and call a function after each batch."""
    async with aclosing(deltas(merger, sources, receive)) as batches:
        async for batch in batches:
            got += batch
            then()


def test_outputs_of_all_prompts_come_as_they_are_there() -> None:
    async def scenario() -> None:
        one, two = Source(), Source()
        one.put(output("a"))
        two.put(output("b"))
        got: list[tuple[int, str]] = []
        async with aclosing(deltas(StreamMerger(60), [one, two])) as batches:
            async for batch in batches:
                got += [(idx, item.request_id) for idx, item in batch]
                if len(got) == 2:
                    one.put(output("c", finished=True))
                    two.put(output("d", finished=True))
        assert sorted(got) == [(0, "a"), (0, "c"), (1, "b"), (1, "d")]
        assert not one.is_ended
        assert not two.is_ended

    asyncio.run(scenario())


def test_what_a_slow_reader_has_not_taken_is_merged() -> None:
    async def scenario() -> None:
        source, num_deltas = Source(), 50
        got: list[Delta] = []
        async with aclosing(deltas(StreamMerger(60), [source])) as batches:
            source.put(delta(0))
            async for batch in batches:
                got += batch
                if len(got) == 1:
                    for token_id in range(1, num_deltas):
                        source.put(delta(token_id, finished=token_id == num_deltas - 1))
        assert [len(item.outputs[0].token_ids) for _, item in got] == [1, num_deltas - 1]
        assert got[1][1].outputs[0].token_ids == list(range(1, num_deltas))
        assert got[1][1].finished

    asyncio.run(scenario())


def test_silence_is_noticed_and_loses_nothing() -> None:
    async def scenario() -> None:
        source = Source()
        silences = 0
        got = []
        async with aclosing(deltas(StreamMerger(0.001), [source])) as batches:
            async for batch in batches:
                if not batch:
                    silences += 1
                    if silences == 3:
                        source.put(output("a", finished=True))
                got += batch
        assert silences >= 3
        assert [item.request_id for _, item in got] == ["a"]

    asyncio.run(scenario())


def test_silence_counts_once_the_engine_has_the_requests() -> None:
    async def scenario() -> None:
        source, calls = Source(), 0

        async def has_added() -> bool:
            nonlocal calls
            calls += 1
            return calls > 3

        batches = deltas(StreamMerger(0.001), [source], never, has_added)
        assert await anext(batches) == []
        assert calls == 4
        assert await anext(batches) == []
        assert calls == 4
        await batches.aclose()

        # A refusal is still the first thing that comes, however long that takes.
        async def refuse() -> bool:
            source.put(stopping())
            return False

        with pytest.raises(ApiError):
            await anext(deltas(StreamMerger(0.001), [source], never, refuse))

    asyncio.run(scenario())


def test_silence_counts_where_one_of_several_requests_has_ended() -> None:
    """The engine does not have all of them any more, and the client has had something."""

    async def ended() -> bool:
        return False

    async def scenario() -> None:
        one, other = Source(), Source()
        one.put(output("a", finished=True))
        batches = deltas(StreamMerger(0.001), [one, other], never, ended)
        assert [item.request_id for _, item in await anext(batches)] == ["a"]
        assert await anext(batches) == []
        await batches.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_disconnect_ends_every_request() -> None:
    async def scenario() -> None:
        sources = [Source(), Source()]
        messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

        async def receive() -> Any:
            return next(messages)

        with pytest.raises(ClientGone):
            await read(StreamMerger(60), sources, receive, [])
        assert all(source.is_ended for source in sources)

    asyncio.run(scenario())


def test_outputs_that_come_with_the_disconnect_are_for_nobody() -> None:
    async def scenario() -> None:
        source, has_left = Source(), asyncio.Event()
        source.put(output("a"))
        merger = StreamMerger(60)
        got: list[Delta] = []

        async def receive() -> Any:
            await has_left.wait()
            source.put(output("b"))
            return {"type": "http.disconnect"}

        def leave() -> None:
            assert not merger.has_client_left
            has_left.set()

        with pytest.raises(ClientGone):
            await read(merger, [source], receive, got, leave)
        assert merger.has_client_left
        assert [item.request_id for _, item in got] == ["a"]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_from_outside", [False, True])
def test_an_error_comes_after_the_outputs_before_it(is_from_outside: bool) -> None:
    async def scenario() -> None:
        sources = [Source(), Source()]
        sources[0].put(output("a"))
        merger = StreamMerger(60)
        got: list[Delta] = []

        def go_wrong() -> None:
            if is_from_outside:
                merger.fail(stopping())
            else:
                sources[1].put(stopping())

        with pytest.raises(ApiError):
            await read(merger, sources, never, got, go_wrong)
        assert len(got) == 1
        assert sources[0].is_ended
        assert sources[1].is_ended == is_from_outside

    asyncio.run(scenario())


def test_cancelling_the_reader_ends_every_request() -> None:
    async def scenario() -> None:
        source = Source()
        source.put(output("a"))
        has_begun = asyncio.Event()

        task = asyncio.create_task(read(StreamMerger(60), [source], never, [], has_begun.set))
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.is_ended

    asyncio.run(scenario())


def test_a_refusal_names_its_prompt_and_ends_the_requests_before_it() -> None:
    async def scenario() -> None:
        source, merger = Source(), StreamMerger(60)

        async def submit(idx: int) -> Callable[[], None]:
            if idx == 1:
                raise InvalidParameter("prompt", "", "a text")
            return source.submit(partial(merger.put, idx))

        with pytest.raises(InvalidParameter) as caught:
            await anext(merger.deltas(3, submit, never, added))
        assert caught.value.prompt_idx == 1
        assert source.is_ended

    asyncio.run(scenario())


def test_a_disconnect_ends_a_submission_that_waits() -> None:
    async def scenario() -> None:
        is_cancelled = False

        async def submit(_: int) -> Callable[[], None]:
            nonlocal is_cancelled
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                is_cancelled = True
                raise
            raise AssertionError

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGone):
            await anext(StreamMerger(60).deltas(1, submit, receive, added))
        assert is_cancelled

    asyncio.run(scenario())
