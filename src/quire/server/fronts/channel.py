"""One end of a socket between two processes: messages of bytes, each after its length."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from quire.server.fronts.messages import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

READ_BYTES: Final = 1 << 18
LENGTH_BYTES: Final = 4
# Bytes that the other end has not read; a process that lets more wait is stuck, and counts as gone.
MAX_UNREAD_BYTES: Final = 2 << 30


class Channel:
    """One end of a connected stream socket; `send` may be called from any thread, all else on the event loop."""

    def __init__(
        self, connected: socket.socket, on_message: Callable[[memoryview], None], on_end: Callable[[], None]
    ) -> None:
        self._socket = connected
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._is_closed = False
        connected.setblocking(False)
        self._loop.add_reader(connected.fileno(), self._on_readable)

    def send(self, message: bytes) -> None:
        """Send a message; what the socket does not take at once is sent later. After the end it is dropped."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message):,} bytes is longer than {MAX_MESSAGE_BYTES:,}")
        data = memoryview(len(message).to_bytes(LENGTH_BYTES, "little") + message)
        with self._lock:
            if self._is_closed:
                return
            if not self._unsent:
                data = data[self._send(data) :]
                if not data:
                    return
                # The loop may have closed, with the process.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._watch_writable)
            self._unsent.append(data)
            self._num_unsent += len(data)
            is_stuck = self._num_unsent > MAX_UNREAD_BYTES
        if is_stuck:
            logger.error("a process has left %d bytes unread, so it counts as gone", self._num_unsent)
            self._loop.call_soon_threadsafe(self._end)

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._unsent.clear()
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()

    def _send(self, data: memoryview) -> int:
        """Return the number of bytes that the socket took; the reader notices its end."""
        try:
            return self._socket.send(data)
        except OSError:
            return 0

    def _watch_writable(self) -> None:
        if not self._is_closed:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        with self._lock:
            while self._unsent:
                first = self._unsent[0]
                num_sent = self._send(first)
                self._num_unsent -= num_sent
                if num_sent < len(first):
                    self._unsent[0] = first[num_sent:]
                    return
                self._unsent.popleft()
            if not self._is_closed:
                self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        self._read += data
        try:
            self._deliver()
        except Exception:
            logger.exception("what came from another process cannot be read, so that counts as gone")
            self._end()

    def _deliver(self) -> None:
        """Call `on_message` with the complete messages, and keep the rest."""
        start, size = 0, len(self._read)
        with memoryview(self._read) as view:
            while size - start >= LENGTH_BYTES and not self._is_closed:
                length = int.from_bytes(view[start : start + LENGTH_BYTES], "little")
                if length > MAX_MESSAGE_BYTES:
                    raise ValueError(f"a message of {length:,} bytes")
                end = start + LENGTH_BYTES + length
                if end > size:
                    break
                with view[start + LENGTH_BYTES : end] as message:
                    self._on_message(message)
                start = end
        del self._read[:start]

    def _end(self) -> None:
        if not self._is_closed:
            self.close()
            self._on_end()
