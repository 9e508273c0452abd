"""JSON answers written in pieces, so that an answer with millions of log probabilities does not block the others."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final

from starlette.types import Receive, Scope, Send

# Marks a place in a text for content that is made later; random and never sent, so no client can forge it.
PLACEHOLDER: Final = secrets.token_hex(16)
# Limits of a piece on its length and on the time to make it.
PIECE_CHARS = 64 << 10
PIECE_S = 0.002
# Time limit of the first piece, which does not wait for the lock: most answers have one piece, and many longer ones may
# begin at the same time.
FIRST_PIECE_S = 0.0005


class JsonArray:
    """An array whose items are made while it is written; each item is written in one step of the event loop."""

    __slots__ = ("items",)

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = items


class JsonWriter:
    """Writes JSON without white space."""

    def __init__(self, *, ascii_only: bool) -> None:
        self._arrays: list[JsonArray] = []
        encoder = json.JSONEncoder(
            ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":"), default=self._register_array
        )
        self._dumps = encoder.encode

    def parts(self, value: Any) -> Iterator[str]:
        """Yield a value's text in small parts."""
        text = self._dumps(value)
        if not self._arrays:
            yield text
            return
        arrays, self._arrays = self._arrays, []
        begin, *sections = text.split(f'"{PLACEHOLDER}"')
        yield begin
        for array, after in zip(arrays, sections, strict=True):
            separator = "["
            for item in array.items:
                yield separator
                yield from self.parts(item)
                separator = ","
            yield "[]" if separator == "[" else "]"
            yield after

    def _register_array(self, value: object) -> str:
        if not isinstance(value, JsonArray):
            raise TypeError(f"{type(value).__name__} is not JSON")
        self._arrays.append(value)
        return PLACEHOLDER


async def paced(parts: Iterable[str], turns: asyncio.Lock) -> AsyncGenerator[bytes, None]:
    """Join the parts of a text into pieces, and yield to the event loop between two pieces.

    Args:
        parts: parts of the text.
        turns: lock that is held for each piece after the first, so that all long texts together take half of the event
            loop's time, and block it no longer than one text does.
    """
    piece, remaining = first_piece(parts)
    if piece:
        yield piece
    if remaining is not None:
        async with aclosing(further_pieces(remaining, turns)) as pieces:
            async for piece in pieces:
                yield piece


def first_piece(parts: Iterable[str]) -> tuple[bytes, Iterator[str] | None]:
    """Return the first piece of a text, and the parts after it; None if it is the last, as in most answers."""
    unread = iter(parts)
    piece, is_last = _next_piece(unread, FIRST_PIECE_S)
    return piece, None if is_last else unread


async def further_pieces(parts: Iterator[str], turns: asyncio.Lock) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a text after the first; see `paced`."""
    is_last = False
    while not is_last:
        async with turns:
            piece, is_last = _next_piece(parts, PIECE_S)
            # The engine's thread gets the interpreter's lock for as long as a piece may hold it.
            await asyncio.sleep(PIECE_S)
        if piece:
            yield piece


def _next_piece(parts: Iterator[str], seconds: float) -> tuple[bytes, bool]:
    """Return the next piece of a text, and whether it is the last."""
    piece: list[str] = []
    num_chars, until_s = 0, time.perf_counter() + seconds
    for part in parts:
        piece.append(part)
        num_chars += len(part)
        if num_chars >= PIECE_CHARS or time.perf_counter() >= until_s:
            return "".join(piece).encode(), False
    return "".join(piece).encode(), True


class JsonAnswer:
    """A JSON response; a short one is sent at once, a long one piece by piece."""

    def __init__(self, body: Mapping[str, Any], turns: asyncio.Lock, at_end: Callable[[], None]) -> None:
        self._body = body
        self._turns = turns
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        """Send the response; stop when the client has left."""
        try:
            await self._send(receive, send)
        finally:
            self._at_end()

    async def _send(self, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        async with aclosing(paced(JsonWriter(ascii_only=False).parts(self._body), self._turns)) as pieces:
            piece, following = await anext(pieces), await anext(pieces, None)
            if following is None:
                headers.append((b"content-length", str(len(piece)).encode()))
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if following is not None:
                leaving = asyncio.create_task(_until_disconnect(receive))
                try:
                    while following is not None and not leaving.done():
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                        piece, following = following, await anext(pieces, None)
                finally:
                    leaving.cancel()
            await send({"type": "http.response.body", "body": piece, "more_body": False})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
