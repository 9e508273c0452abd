"""Processes that work within limits of time and memory, for work whose cost somebody else decides.

Compiled code cannot be interrupted within its own process, and memory that a process has taken by the time it fails is
felt by all that runs in it. So grammars of clients are compiled, templates of models rendered and large bodies parsed
in processes of their own. An alarm that nothing handles ends such a process after the time limit, and the system
refuses it memory beyond its limit.

A question and its answer are bytes, each behind its length; what they mean is the program's affair.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
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
from typing import Any, Generic, Literal, Protocol, TypeVar

from quire.errors import WorkerError

START_TIMEOUT_S = 120.0
# The process ends itself; this long after its time the parent does it.
GRACE_S = 2.0
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from quire.bounded.process import main; main()"
# Behind a question and an answer of so many bytes, memory is given back to the system.
MANY_BYTES = 1 << 20
# The bytes of what follows, and the seconds that answering it may take.
QUESTION = struct.Struct("!Qd")
ANSWER = struct.Struct("!Q")

# Takes the setup, returns what answers questions.
Program = Callable[[bytes], Callable[[bytes], bytes]]


class LimitExceeded(Exception):
    """A question went over a limit, and its process has ended.

    Args:
        limit: "time"; or "memory", which stands for the stack too.
    """

    def __init__(self, limit: Literal["time", "memory"]) -> None:
        super().__init__(limit)
        self.limit = limit


class BoundedProcess:
    """A process that answers one question after the other. It is started at once and waited for at the first question.

    Args:
        program: where its `Program` is found, as "module:function"; it imports no more than that needs.
        setup: given to the program, once.
        memory_bytes: that answers may add to what the process takes once it is set up.

    Raises:
        WorkerError: the system starts no more processes.
    """

    def __init__(self, program: str, setup: bytes, memory_bytes: int) -> None:
        self._is_ready = self._is_stopped = False
        self._setup = setup
        # Signals of the terminal are the parent's affair.
        places = json.dumps([str(place) for place in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOT, places, program, str(memory_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise _no_start(error.strerror or str(error)) from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin.fileno(), self._process.stdout.fileno()
        for pipe in (self._input, self._output):
            os.set_blocking(pipe, False)
        # A process that nobody closes ends with its owner all the same.
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """False once a question, or somebody else, has ended the process."""
        return self._process.poll() is None

    def ask(self, question: bytes, timeout_s: float) -> bytes:
        """Return the answer to a question.

        Raises:
            LimitExceeded: answering takes longer than `timeout_s`, or more memory than it may.
            WorkerError: the process does not start, or was stopped.
        """
        try:
            if not self._is_ready:
                self._wait_for_start()
            answer = self._exchange(question, timeout_s, timeout_s + GRACE_S)
        except BaseException:
            # Interrupted: the answer to this question would be taken for that to the next.
            self.close()
            raise
        if answer is not None:
            return answer
        code = self._process.poll()
        self.close()
        if self._is_stopped:
            raise _shut_down()
        if code == -signal.SIGKILL:
            # Its own limits end it otherwise: it was somebody else, the system when memory was short, say.
            raise WorkerError("a process of limited time and memory was killed")
        raise LimitExceeded("time" if code is None or code == -signal.SIGALRM else "memory")

    def stop(self) -> None:
        """Have a question that another thread asks fail at once."""
        self._is_stopped = True
        self._process.kill()

    def close(self) -> None:
        """End the process, in whatever state it is; no thread may be asking it something."""
        self._end()

    def _wait_for_start(self) -> None:
        if self._exchange(self._setup, START_TIMEOUT_S, START_TIMEOUT_S) is None:
            self.close()
            raise _no_start("it has ended")
        self._is_ready, self._setup = True, b""

    def _exchange(self, question: bytes, timeout_s: float, patience_s: float) -> bytes | None:
        """Write a question and return what comes back; None where nothing whole comes in time."""
        deadline = time.monotonic() + patience_s
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
    """Return once a pipe can be read or written.

    Raises:
        TimeoutError: it cannot by the deadline.
    """
    poll = select.poll()  # `select.select` knows no descriptors above 1023
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
    """What a pool holds, see `BoundedProcess`."""

    @property
    def is_alive(self) -> bool: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


T = TypeVar("T", bound=Pooled)


class ProcessPool(Generic[T]):
    """At most so many processes, each started when it is first needed, and again when it has ended.

    Args:
        start: returns a process.
        size: how many may be in use at once; who comes then waits.
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
        """Lend a process that nobody else uses.

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
                # Whether it is closed is looked at where `close` looks at what is used: one of them sees the other.
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
        """Return the processes that wait for work."""
        return [process for process in tuple(self._idle.queue) if process is not None]

    def close(self) -> None:
        """End all processes; what they work on fails."""
        with self._lock:
            self._is_closed = True
            for process in self._used:
                process.stop()
        for idle in self.idle():
            idle.close()


# ---- the process itself ----


def main() -> None:
    """Answer questions until there are no more: what `sys.argv` names, once it has had its setup."""
    where, memory_bytes = sys.argv[2], int(sys.argv[3])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Whatever a program prints goes the way of its errors.
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, _, name = where.partition(":")
    program: Program = getattr(importlib.import_module(module), name)
    num_bytes, _ = QUESTION.unpack(source.read(QUESTION.size))
    answer = program(source.read(num_bytes))
    limit_memory(memory_bytes)
    _send(sink, b"")
    while header := source.read(QUESTION.size):
        num_bytes, timeout_s = QUESTION.unpack(header)
        question = source.read(num_bytes)
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        reply = answer(question)
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
    """Have the system refuse this process more than so many bytes beyond what it has, and write no core."""
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = num_pages * os.sysconf("SC_PAGE_SIZE") + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def resident_bytes() -> int:
    """Return the memory that this process has, what is free in it given back."""
    return_freed_memory()
    num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def return_freed_memory() -> None:
    """Give memory that the C library holds for later back to the system, where the library has a call for that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
