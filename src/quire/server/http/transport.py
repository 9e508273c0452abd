"""A transport that counts bytes, and a writer of bodies, for connections."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

# Key of the ASGI scope with the `BodyWriter` of the answer.
BODY_WRITER: Final = "quire.body_writer"


class CountingTransport:
    """A transport that counts the bytes that it sends."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_written = 0

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
        """Send bytes as soon as the client reads them."""
        self._num_written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class BodyWriter:
    """Writes parts of the body of an answer that has begun, without a turn of the event loop."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    @property
    def can_write(self) -> bool:
        """True if the answer has begun and not ended, and the client reads fast enough."""
        cycle = self._cycle
        is_open = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return is_open and not cycle.flow.write_paused

    def write(self, data: bytes) -> None:
        """Write a part that is not empty; called only while `can_write` is true."""
        self._cycle.transport.write(self._cycle.conn.send(h11.Data(data=data)))
