"""Writes of one turn of the event loop are one send, in order, whatever comes next."""

from __future__ import annotations

import asyncio
from typing import Any

from quire.server.http.transport import MAX_HELD_BYTES, CountingTransport


class Sends:
    """Stands for the transport of a socket: keeps what it is given."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ends: list[str] = []

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("aborted")


def test_what_is_written_in_one_turn_is_one_send() -> None:
    async def run() -> None:
        sends: Any = Sends()
        transport = CountingTransport(sends)
        for part in (b"head", b"", b"first"):
            transport.write(part)
        assert (sends.sent, transport.get_write_buffer_size()) == ([], 9)
        await asyncio.sleep(0)
        assert (sends.sent, transport.get_write_buffer_size()) == ([b"headfirst"], 0)
        transport.write_now(b"now")
        assert sends.sent[1:] == [b"now"]
        transport.write(b"before")
        transport.write_now(b"after")
        await asyncio.sleep(0)
        assert sends.sent[2:] == [b"beforeafter"]

    asyncio.run(run())


def test_much_is_sent_at_once_and_the_end_loses_nothing() -> None:
    async def run() -> None:
        sends: Any = Sends()
        transport = CountingTransport(sends)
        large = bytes(MAX_HELD_BYTES)
        transport.write(b"head")
        transport.write(large)
        assert sends.sent == [b"head" + large]
        transport.write(b"last")
        transport.close()
        assert (sends.sent[1:], sends.ends) == ([b"last"], ["closed"])
        transport.write(b"lost")
        transport.abort()
        await asyncio.sleep(0)
        assert (sends.sent[2:], sends.ends) == ([], ["closed", "aborted"])

    asyncio.run(run())
