"""JSON answers that are written while they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from quire.server.http.json_stream import PIECE_CHARS, JsonAnswer, JsonArray, JsonWriter, paced


def text(value: Any) -> str:
    return "".join(JsonWriter(ascii_only=False).parts(value))


def test_arrays_are_written_where_they_stand() -> None:
    inner = {"b": JsonArray(range(3)), "c": [JsonArray([])]}
    value = {"a": JsonArray([inner, "\u00e9", None]), "d": JsonArray(iter([])), "e": [1.5, "x"]}
    assert text(value) == '{"a":[{"b":[0,1,2],"c":[[]]},"\u00e9",null],"d":[],"e":[1.5,"x"]}'
    assert "".join(JsonWriter(ascii_only=True).parts("\u2028")) == '"\\u2028"'


@pytest.mark.parametrize("value", [float("nan"), {"a": JsonArray([float("-inf")])}])
def test_what_json_does_not_have_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        text(value)
    with pytest.raises(TypeError, match="set is not JSON"):
        text({1})


def test_items_are_made_when_it_is_their_turn() -> None:
    made = []

    def items() -> Iterator[int]:
        for number in range(3):
            made.append(number)
            yield number

    parts = JsonWriter(ascii_only=False).parts({"a": JsonArray(items())})
    assert next(parts) == '{"a":'
    assert made == []
    assert "".join(parts) == "[0,1,2]}"


def test_others_are_served_between_pieces() -> None:
    async def scenario() -> tuple[int, int, str]:
        num_turns = 0

        async def other() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        pieces = [piece async for piece in paced(("x" * 1000 for _ in range(1000)), asyncio.Lock())]
        task.cancel()
        return len(pieces), num_turns, b"".join(pieces).decode()

    num_pieces, num_turns, whole = asyncio.run(scenario())
    assert whole == "x" * 1_000_000
    assert num_pieces >= 1_000_000 // (PIECE_CHARS + 1000)
    assert num_turns >= num_pieces - 1


def test_long_answers_take_turns_and_short_ones_wait_for_none() -> None:
    """In each turn of the event loop one long answer at most is written, however many there are."""
    turns = asyncio.Lock()
    num_made, most_made = 0, 0

    def parts() -> Iterator[str]:
        nonlocal num_made
        for _ in range(4 * PIECE_CHARS // 1000):
            num_made += 1
            yield "x" * 1000

    async def scenario() -> None:
        nonlocal num_made, most_made
        writers = [paced(parts(), turns) for _ in range(20)]
        for writer in writers:
            await anext(writer)  # the first pieces go out at once

        async def write(writer: AsyncIterator[bytes]) -> None:
            async for _ in writer:
                pass

        tasks = [asyncio.create_task(write(writer)) for writer in writers]
        while not all(task.done() for task in tasks):
            num_made = 0
            await asyncio.sleep(0)
            most_made = max(most_made, num_made)
            if turns.locked():
                assert [piece async for piece in paced(["short"], turns)] == [b"short"]

    asyncio.run(scenario())
    assert 0 < most_made <= PIECE_CHARS // 1000 + 1


async def never() -> Any:
    await asyncio.Event().wait()


def test_a_short_answer_has_a_length_and_a_long_one_comes_in_pieces() -> None:
    def messages(body: dict[str, Any]) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(JsonAnswer(body, asyncio.Lock(), lambda: None)({"type": "http"}, never, send))
        return sent

    start, only = messages({"a": 1})
    assert dict(start["headers"]) == {b"content-type": b"application/json", b"content-length": b"7"}
    assert (only["body"], only["more_body"]) == (b'{"a":1}', False)
    start, *pieces = messages({"a": JsonArray(["x" * 1000] * 1000)})
    assert b"content-length" not in dict(start["headers"])
    assert [piece["more_body"] for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    assert len(json.loads(b"".join(piece["body"] for piece in pieces))["a"]) == 1000


def test_nothing_more_is_made_once_the_client_has_gone() -> None:
    num_made, num_sent = 0, 0

    def items() -> Iterator[str]:
        nonlocal num_made
        for _ in range(1000):
            num_made += 1
            yield "x" * 10_000

    async def scenario() -> None:
        has_left = asyncio.Event()

        async def send(_: Any) -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent == 3:
                has_left.set()

        async def receive() -> Any:
            await has_left.wait()
            return {"type": "http.disconnect"}

        await JsonAnswer({"a": JsonArray(items())}, asyncio.Lock(), lambda: None)({"type": "http"}, receive, send)

    asyncio.run(scenario())
    assert num_made < 100
