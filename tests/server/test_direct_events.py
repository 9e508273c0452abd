"""Events that are written without waking their stream's task: what they are, and when they are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.server.admission.stream_merge import Delta, StreamMerger
from quire.server.admission.usage import TokenCount
from quire.server.generation.generation import OpenAIReply, ResponseBuilder
from quire.server.generation.logprob_fields import TokenNames
from quire.server.http.direct_events import MAX_CHARS, DirectEvents
from quire.server.protocols.chat_completions import ChatExtras, ChatReply
from quire.server.protocols.completions import CompletionExtras, CompletionReply
from tests.server.test_stream_merge import Source, deltas, never, read

PATIENCE_S = 60
HEAD = {"id": "a-1", "object": "o", "created": 1, "model": 'name with "quotes" and {"mark": []}', "usage_of": "x"}
NAMES = TokenNames(None, by_id=False)
TEXTS = [" plain", 'quote " and \\ and \n', "é 🦄 \u2028 \x00", "", "data: [DONE]\n\n"]


class Written:
    """Stands for the body of an answer: keeps what is written."""

    def __init__(self) -> None:
        self.can_write = True
        self.pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.pieces.append(data)


def delta(text: str, index: int = 0, **fields: Any) -> RequestOutput:
    return RequestOutput("r", None, [1, 2], [CompletionOutput(index, text, [5], **fields)])


def completion(*, token_ids: bool = False) -> ResponseBuilder:
    extras = CompletionExtras(False, None, None, False, token_ids, True)
    return CompletionReply(HEAD, [[1, 2]], 2, extras, NAMES, None)


def chat(*, token_ids: bool = False) -> ResponseBuilder:
    return ChatReply(HEAD, ChatExtras(None, None, token_ids), NAMES)


def waiting(scenario: Callable[[StreamMerger, list[Delta]], Any]) -> None:
    """Run a scenario while a task waits for the deltas of a merger."""

    async def run() -> None:
        merger = StreamMerger(60)
        got: list[Delta] = []
        task = asyncio.create_task(read(merger, [Source()], never, got))
        async with asyncio.timeout(PATIENCE_S):
            while not merger.is_waiting:
                await asyncio.sleep(0)
            await scenario(merger, got)
            merger.fail(RuntimeError("the end"))
            with pytest.raises(RuntimeError):
                await task
        assert not merger.is_waiting

    asyncio.run(run())


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize(("include_usage", "continuous_usage"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("token_ids", [False, True])
def test_events_of_further_text_are_those_that_the_task_would_send(
    make: Callable[..., ResponseBuilder], include_usage: bool, continuous_usage: bool, token_ids: bool
) -> None:
    options: Any = SimpleNamespace(include_usage=include_usage, continuous_usage=continuous_usage)

    async def scenario(merger: StreamMerger, _: list[Delta]) -> None:
        sides = []
        for is_framed in (True, False):
            reply, count = OpenAIReply(make(token_ids=token_ids), options), TokenCount()
            direct = DirectEvents(reply, count, merger, reply.text_chunk if is_framed else None)
            written: Any = Written()
            direct.writer = written
            for idx, text in enumerate(["first", *TEXTS, *TEXTS]):
                assert direct.take(0, delta(text, index=0 if idx < 3 else idx % 2))
            sides.append((written.pieces, count.num_output))
        assert sides[0] == sides[1]
        pieces, num_output = sides[0]
        assert num_output == 1 + 2 * len(TEXTS)
        assert all(piece.startswith(b"data: {") and piece.endswith(b"\n\n") and piece.isascii() for piece in pieces)

    waiting(scenario)


def test_all_but_short_text_for_a_reading_client_is_left_to_the_task() -> None:
    options: Any = SimpleNamespace(include_usage=False, continuous_usage=False)

    async def scenario(merger: StreamMerger, _: list[Delta]) -> None:
        count, written = TokenCount(), Written()
        direct = DirectEvents(OpenAIReply(completion(), options), count, merger)
        assert not direct.take(0, delta("before the first event"))
        writer: Any = written
        direct.writer = writer
        last = delta("last")
        last.finished = True
        for left in (last, delta("end", finish_reason="stop"), delta("x" * (MAX_CHARS + 1))):
            assert not direct.take(0, left)
        written.can_write = False
        assert not direct.take(0, delta("unread"))
        written.can_write = True
        assert (count.num_output, written.pieces) == (0, [])
        assert direct.take(0, delta("now"))
        assert len(written.pieces) == 1

    waiting(scenario)


def test_nothing_overtakes_what_the_task_has_not_sent() -> None:
    options: Any = SimpleNamespace(include_usage=False, continuous_usage=False)

    async def scenario() -> None:
        merger, source, batches = StreamMerger(60), Source(), asyncio.Queue[list[Delta]]()
        go_on = asyncio.Event()

        async def run() -> None:
            async for batch in deltas(merger, [source], take=direct.take):
                batches.put_nowait(batch)
                await go_on.wait()  # the client does not read

        direct, written = DirectEvents(OpenAIReply(completion(), options), TokenCount(), merger), Written()
        task = asyncio.create_task(run())
        source.put(delta("first"))
        await batches.get()
        writer: Any = written
        direct.writer = writer
        source.put(delta("second"))
        assert not written.pieces
        go_on.set()
        assert [each.outputs[0].text for _, each in await batches.get()] == ["second"]
        while not merger.is_waiting:
            await asyncio.sleep(0)
        source.put(delta("third"))
        assert len(written.pieces) == 1
        merger.fail(RuntimeError("the end"))
        source.put(delta("fourth"))
        assert len(written.pieces) == 1
        assert [each.outputs[0].text for _, each in await batches.get()] == ["fourth"]
        with pytest.raises(RuntimeError):
            await task

    asyncio.run(scenario())


def test_an_error_ends_its_own_answer_only() -> None:
    class Broken(OpenAIReply):
        def chunks(self, *_: Any) -> Any:
            raise ValueError("no JSON")

    options: Any = SimpleNamespace(include_usage=False, continuous_usage=False)

    async def run() -> None:
        merger = StreamMerger(60)
        task = asyncio.create_task(read(merger, [Source()], never, []))
        while not merger.is_waiting:
            await asyncio.sleep(0)
        direct = DirectEvents(Broken(completion(), options), TokenCount(), merger)
        writer: Any = Written()
        direct.writer = writer
        assert direct.take(0, delta("x"))
        with pytest.raises(ValueError, match="no JSON"):
            await task

    asyncio.run(run())
