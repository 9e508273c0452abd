"""Writes of one turn of the event loop are one send, in order, whatever comes next."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn

from quire.server.http.connection import Connection, Connections
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

    def get_extra_info(self, _: str) -> None:
        return None

    def is_closing(self) -> bool:
        return bool(self.ends)

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
        # A client that has not been sent anything is not late to read it.
        assert (sends.sent, transport.get_write_buffer_size(), transport.num_sent) == ([], 0, 0)
        await asyncio.sleep(0)
        assert (sends.sent, transport.num_sent) == ([b"headfirst"], 9)
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


def test_a_client_is_not_late_to_read_what_was_not_sent() -> None:
    async def run() -> None:
        sends: Any = Sends()
        settings = uvicorn.Config(lambda *_: None, http=Connection, lifespan="off", log_config=None)  # type: ignore[arg-type, return-value]
        settings.load()
        server_state = uvicorn.Server(settings).server_state
        connection = Connection(
            Connections(8, 60.0, 60.0, 60.0), config=settings, server_state=server_state, app_state={}
        )
        connection.connection_made(sends)
        connection.transport.write(b"head")
        connection.check()
        await asyncio.sleep(0)
        assert (sends.sent, sends.ends) == ([b"head"], [])

    asyncio.run(run())
