"""Merging outputs, the client's disconnect and the server's stop, on a real event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.server.admission.stream_merge import ClientGone, Delta, StreamMerger
from quire.server.requests.errors import ApiError, stopping

Receive = Callable[[], Awaitable[Any]]


def output(name: str) -> RequestOutput:
    return RequestOutput(name, None, [1], [])


def delta(token_id: int) -> RequestOutput:
    return RequestOutput("a", None, [1], [CompletionOutput(0, text="x", token_ids=[token_id])])


class Source:
    """A stream that yields the items of a queue, and records whether it was closed."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def stream(self) -> AsyncGenerator[RequestOutput, None]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


async def never() -> Any:
    await asyncio.Event().wait()


async def added() -> bool:
    return True


async def read(
    merger: StreamMerger,
    sources: list[Source],
    receive: Receive,
    got: list[Delta],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Read all deltas of a merger, and call a function after each batch."""
    async with aclosing(merger.deltas([source.stream() for source in sources], receive, added)) as batches:
        async for batch in batches:
            got += batch
            then()


def test_outputs_of_all_prompts_come_as_they_are_there() -> None:
    async def scenario() -> None:
        one, two = Source(), Source()
        one.items.put_nowait(output("a"))
        two.items.put_nowait(output("b"))
        got: list[tuple[int, str]] = []
        async with aclosing(StreamMerger(60).deltas([one.stream(), two.stream()], never, added)) as batches:
            async for batch in batches:
                got += [(idx, item.request_id) for idx, item in batch]
                if len(got) == 2:
                    one.items.put_nowait(None)
                    two.items.put_nowait(output("c"))
                    two.items.put_nowait(None)
        assert sorted(got) == [(0, "a"), (1, "b"), (1, "c")]
        assert one.is_closed
        assert two.is_closed

    asyncio.run(scenario())


def test_what_a_slow_reader_has_not_taken_is_merged() -> None:
    async def scenario() -> None:
        source, num_deltas = Source(), 50
        got: list[Delta] = []
        async with aclosing(StreamMerger(60).deltas([source.stream()], never, added)) as batches:
            source.items.put_nowait(delta(0))
            async for batch in batches:
                got += batch
                if len(got) == 1:
                    for token_id in range(1, num_deltas):
                        source.items.put_nowait(delta(token_id))
                    source.items.put_nowait(None)
                    while not source.is_closed:
                        await asyncio.sleep(0)
        assert [len(item.outputs[0].token_ids) for _, item in got] == [1, num_deltas - 1]
        assert got[1][1].outputs[0].token_ids == list(range(1, num_deltas))
        assert got[1][1].finished is False

    asyncio.run(scenario())


def test_silence_is_noticed_and_loses_nothing() -> None:
    async def scenario() -> None:
        source = Source()
        silences = 0
        got = []
        async with aclosing(StreamMerger(0.001).deltas([source.stream()], never, added)) as batches:
            async for batch in batches:
                if not batch:
                    silences += 1
                    if silences == 3:
                        source.items.put_nowait(output("a"))
                        source.items.put_nowait(None)
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

        batches = StreamMerger(0.001).deltas([source.stream()], never, has_added)
        assert await anext(batches) == []
        assert calls == 4
        assert await anext(batches) == []
        assert calls == 4
        await batches.aclose()

        # A refusal is still the first thing that comes, however long that takes.
        async def refuse() -> bool:
            source.items.put_nowait(stopping())
            return False

        with pytest.raises(ApiError):
            await anext(StreamMerger(0.001).deltas([source.stream()], never, refuse))

    asyncio.run(scenario())


def test_silence_counts_where_one_of_several_requests_has_ended() -> None:
    """The engine does not have all of them any more, and the client has had something."""

    async def ended() -> bool:
        return False

    async def scenario() -> None:
        one, other = Source(), Source()
        one.items.put_nowait(output("a"))
        one.items.put_nowait(None)
        batches = StreamMerger(0.001).deltas([one.stream(), other.stream()], never, ended)
        assert [item.request_id for _, item in await anext(batches)] == ["a"]
        assert await anext(batches) == []
        await batches.aclose()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_disconnect_closes_every_stream() -> None:
    async def scenario() -> None:
        sources = [Source(), Source()]
        messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

        async def receive() -> Any:
            return next(messages)

        with pytest.raises(ClientGone):
            await read(StreamMerger(60), sources, receive, [])
        assert all(source.is_closed for source in sources)

    asyncio.run(scenario())


def test_outputs_that_come_with_the_disconnect_are_for_nobody() -> None:
    async def scenario() -> None:
        source, has_left = Source(), asyncio.Event()
        source.items.put_nowait(output("a"))
        merger = StreamMerger(60)
        got: list[Delta] = []

        async def receive() -> Any:
            await has_left.wait()
            return {"type": "http.disconnect"}

        def leave() -> None:
            assert not merger.has_client_left
            source.items.put_nowait(output("b"))
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
        sources[0].items.put_nowait(output("a"))
        merger = StreamMerger(60)
        got: list[Delta] = []

        def go_wrong() -> None:
            if is_from_outside:
                merger.fail(stopping())
            else:
                sources[1].items.put_nowait(stopping())

        with pytest.raises(ApiError):
            await read(merger, sources, never, got, go_wrong)
        assert len(got) == 1
        assert all(source.is_closed for source in sources)

    asyncio.run(scenario())


def test_cancelling_the_reader_closes_every_stream() -> None:
    async def scenario() -> None:
        source = Source()
        source.items.put_nowait(output("a"))
        has_begun = asyncio.Event()

        task = asyncio.create_task(read(StreamMerger(60), [source], never, [], has_begun.set))
        await has_begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.is_closed

    asyncio.run(scenario())
