"""A transport that counts bytes and joins writes, and a writer of bodies, for connections."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

# Key of the ASGI scope with the `BodyWriter` of the answer.
BODY_WRITER: Final = "quire.body_writer"
# Bytes that are written in one turn of the event loop, above which they are sent at once.
MAX_HELD_BYTES: Final = 64 << 10


class CountingTransport:
    """A transport that counts the bytes that it sends, and sends what is written in one turn of the event loop at once.

    An answer's head, its first part, its last one and the end of its body are written one by one. Each send takes as
    long as the text of many events, and lets the engine's thread have the interpreter's lock for up to 5 ms.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._num_written = 0
        # Parts that were written in this turn of the event loop; no client is late to read them, so they are not in
        # `get_write_buffer_size`.
        self._held: list[bytes] = []
        self._num_held = 0

    @property
    def num_sent(self) -> int:
        """Number of bytes that the client has read or, on systems that do not report it, that the kernel has taken."""
        return self._num_written - self._transport.get_write_buffer_size() - self._num_in_kernel()

    def _num_in_kernel(self) -> int:
        # The kernel buffers some megabytes, and accepts more only after it has sent a large part of them.
        count = array("i", [0])
        try:
            import fcntl  # not on Windows
            import termios

            fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
        except (ImportError, OSError, AttributeError):
            return 0
        return count[0]

    def write(self, data: bytes) -> None:
        """Send bytes with all others of this turn of the event loop, as soon as the client reads them."""
        if not data:
            return
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._num_held += len(data)
        if self._num_held > MAX_HELD_BYTES:
            self._flush()

    def write_now(self, data: bytes) -> None:
        """Send bytes in this call, unless others must be sent before."""
        if self._held:
            self.write(data)
        else:
            self._num_written += len(data)
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection after what was written is sent."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once."""
        self._held, self._num_held = [], 0
        self._transport.abort()

    def _flush(self) -> None:
        chunks, self._held, self._num_held = self._held, [], 0
        if chunks:
            self.write_now(b"".join(chunks))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BodyWriter:
    """Writes parts of the body of an answer that has begun, without a turn of the event loop."""

    __slots__ = ("_cycle", "_transport")

    def __init__(self, cycle: RequestResponseCycle, transport: CountingTransport) -> None:
        self._cycle = cycle
        self._transport = transport

    @property
    def can_write(self) -> bool:
        """True if the answer has begun and not ended, and the client reads fast enough."""
        cycle = self._cycle
        is_open = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return is_open and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Write a part that is not empty; called only while `can_write` is true."""
        self._transport.write_now(self._cycle.conn.send(h11.Data(data=data)))
