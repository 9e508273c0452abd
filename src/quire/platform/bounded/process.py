"""Processes with limits of time and memory, for work on untrusted input.

Compiled code cannot be interrupted within its own process, and memory that it allocates before it fails is lost to the
whole process. So clients' grammars are compiled, models' chat templates rendered and large bodies parsed in separate
processes. An unhandled alarm signal ends such a process after the time limit, and the system refuses it memory beyond
the memory limit. On Windows, the parent ends a process shortly after the time limit. On Windows and macOS, memory is
not limited.

A question and its answer are bytes, each preceded by its length; the program defines their meaning.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import LifoQueue
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from quire.errors import WorkerError
from quire.platform.child_process import ChildProcess, function_at

START_TIMEOUT_S = 120.0
# The process ends itself at the time limit; the parent kills it this much later.
GRACE_S = 2.0
# Memory is returned to the system after a question and its answer have more bytes than this together.
MANY_BYTES = 1 << 20
# False on Windows, whose pipes block: a timer in the parent ends the process at the deadline.
CAN_POLL = hasattr(select, "poll")
# Length of the question that follows, and the time limit of its answer in seconds.
QUESTION = struct.Struct("!Qd")
ANSWER = struct.Struct("!Q")

# Function from the setup to the function that answers questions.
Program = Callable[[bytes], Callable[[bytes], bytes]]


class RemoteCall(NamedTuple):
    """A call that another process can make.

    Args:
        location: location of the function as "module:function".
        arguments: its arguments.
    """

    location: str
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        """Make the call."""
        return function_at(self.location)(*self.arguments)


class LimitExceeded(Exception):
    """A question exceeded a limit, and its process has ended.

    Args:
        limit: "time", or "memory", which includes the stack.
    """

    def __init__(self, limit: Literal["time", "memory"]) -> None:
        super().__init__(limit)
        self.limit = limit


class BoundedProcess:
    """A process that answers one question at a time; it starts immediately, and the first question waits for the start.

    Args:
        program: location of its `Program` as "module:function"; only this module is imported.
        setup: argument of the program.
        memory_bytes: maximum memory that answers may use in addition to the memory of the process after its setup.

    Raises:
        WorkerError: the system starts no more processes.
    """

    def __init__(self, program: str, setup: bytes, memory_bytes: int) -> None:
        self._is_ready = self._is_stopped = False
        self._setup = setup
        try:
            self._process = ChildProcess(
                "quire.platform.bounded.process:main",
                program,
                memory_bytes,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        except OSError as error:
            raise _no_start(error.strerror or str(error)) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        if CAN_POLL:
            for pipe in (self._input, self._output):
                os.set_blocking(pipe, False)
        # A process that is not closed ends when this object is collected.
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False once the process has ended, by a limit or for another reason."""
        return self._process.poll() is None

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Return the answer to a question.

        Raises:
            LimitExceeded: answering takes longer than `timeout_s`, or more memory than allowed.
            WorkerError: the process does not start, or was stopped.
        """
        try:
            if not self._is_ready:
                self._wait_for_start()
            answer = self._exchange(question, timeout_s, timeout_s + GRACE_S)
        except BaseException:
            # After an interruption, the answer to this question would be read as the answer to the next one.
            self.close()
            raise
        if answer is not None:
            return answer
        code = self._process.poll()
        self.close()
        if self._is_stopped:
            raise _shut_down()
        if not CAN_POLL:
            raise LimitExceeded("time")
        if code == -signal.SIGKILL:
            # Its own limits end it in other ways; this was, for example, the system's out-of-memory killer.
            raise WorkerError("a process of limited time and memory was killed")
        raise LimitExceeded("time" if code is None or code == -signal.SIGALRM else "memory")

    def stop(self) -> None:
        """Abort the question of another thread."""
        self._is_stopped = True
        self._process.kill()

    def close(self) -> None:
        """End the process in any state; no question may be in progress."""
        self._end()

    def _wait_for_start(self) -> None:
        if self._exchange(self._setup, START_TIMEOUT_S, START_TIMEOUT_S) is None:
            self.close()
            raise _no_start("it has ended")
        self._is_ready, self._setup = True, b""

    def _exchange(self, question: bytes, timeout_s: float, patience_s: float) -> bytes | None:
        """Write a question and return its answer; None if no complete answer arrives in time."""
        deadline = time.monotonic() + patience_s
        killer = None if CAN_POLL else threading.Timer(patience_s, self._process.kill)
        if killer is not None:
            killer.start()
        try:
            self._write(QUESTION.pack(len(question), timeout_s), deadline)
            self._write(question, deadline)
            (num_bytes,) = ANSWER.unpack(self._read(ANSWER.size, deadline))
            return self._read(num_bytes, deadline)
        except TimeoutError:
            return None
        except OSError:  # the process has ended, or is about to
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            return None
        finally:
            if killer is not None:
                killer.cancel()

    def _write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            _wait(self._input, select.POLLOUT, deadline)
            left = left[os.write(self._input, left) :]

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while num_bytes:
            _wait(self._output, select.POLLIN, deadline)
            part = os.read(self._output, min(num_bytes, 1 << 20))
            if not part:
                raise BrokenPipeError
            parts.append(part)
            num_bytes -= len(part)
        return b"".join(parts)


def _wait(pipe: int, event: int, deadline: float) -> None:
    """Return once a pipe can be read or written."""
    if not CAN_POLL:
        return
    poll = select.poll()  # `select.select` supports no descriptors above 1023
    poll.register(pipe, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def _no_start(why: str) -> WorkerError:
    return WorkerError(f"a process of limited time and memory does not start: {why}")


def _shut_down() -> WorkerError:
    return WorkerError("the engine was shut down")


class Pooled(Protocol):
    """Interface of the processes in a pool; see `BoundedProcess`."""

    @property
    def is_alive(self) -> bool: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


T = TypeVar("T", bound=Pooled)


class ProcessPool(Generic[T]):
    """A pool of processes, which start when they are needed, and again after they have ended.

    Args:
        start: function that returns a new process.
        size: maximum number of processes; further threads wait for one.
    """

    def __init__(self, start: Callable[[], T], size: int) -> None:
        self._start = start
        self._idle: LifoQueue[T | None] = LifoQueue()
        for _ in range(size):
            self._idle.put(None)
        self._lock = threading.Lock()
        self._used: set[T] = set()
        self._is_closed = False

    @contextmanager
    def process(self) -> Iterator[T]:
        """Lend an unused process.

        Raises:
            WorkerError: the pool is closed, or `start` raises it.
        """
        process = self._idle.get()
        try:
            if process is not None and not process.is_alive:
                process.close()
                process = None
            if process is None and not self._is_closed:
                process = self._start()
            with self._lock:
                # The lock orders this and `close`: either `close` sees the process, or this code sees the closed pool.
                if self._is_closed or process is None:
                    raise _shut_down()
                self._used.add(process)
            try:
                yield process
            finally:
                with self._lock:
                    self._used.remove(process)
        finally:
            if self._is_closed and process is not None:
                process.close()
            self._idle.put(process)

    def idle(self) -> list[T]:
        """Return the idle processes."""
        return [process for process in tuple(self._idle.queue) if process is not None]

    def close(self) -> None:
        """End all processes; questions in progress fail."""
        with self._lock:
            self._is_closed = True
            for process in self._used:
                process.stop()
        for idle in self.idle():
            idle.close()


# ---- code of the process ----


def main(location: str, memory_bytes: int) -> None:
    """Run a program: read its setup, then answer questions until the input ends."""
    has_alarm = hasattr(signal, "setitimer")
    if has_alarm:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Output that the program prints is redirected to stderr.
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    program: Program = function_at(location)
    num_bytes, _ = QUESTION.unpack(source.read(QUESTION.size))
    answer = program(source.read(num_bytes))
    limit_memory(memory_bytes)
    _send(sink, b"")
    while header := source.read(QUESTION.size):
        num_bytes, timeout_s = QUESTION.unpack(header)
        question = source.read(num_bytes)
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
        reply = answer(question)
        if has_alarm:
            signal.setitimer(signal.ITIMER_REAL, 0)
        _send(sink, reply)
        if len(question) + len(reply) > MANY_BYTES:
            del question, reply
            return_freed_memory()


def _send(sink: Any, reply: bytes) -> None:
    sink.write(ANSWER.pack(len(reply)))
    sink.write(reply)
    sink.flush()


def limit_memory(memory_bytes: int) -> None:
    """Limit the memory of this process to `memory_bytes` beyond its present size, and disable core dumps.

    On systems that do not report the present size, there is no limit.
    """
    num_bytes = _bytes_of_this_process(0)
    if num_bytes is None:
        return
    import resource

    limit = num_bytes + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, after freed memory was returned to the system.

    0 on systems that do not report it.
    """
    return_freed_memory()
    return _bytes_of_this_process(1) or 0


def _bytes_of_this_process(column: int) -> int | None:
    """Return a size of this process from Linux's `statm`, in bytes; None on other systems."""
    try:
        num_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[column]
    except OSError:
        return None
    return int(num_pages) * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Return freed memory that the C library caches to the system, if the library supports it."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
