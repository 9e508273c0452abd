"""Bounded processes keep their limits, are replaced after they end, and outlive no parent."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from quire.errors import WorkerError
from quire.platform.bounded.process import BoundedProcess, LimitExceeded, ProcessPool

ECHO = "tests.bounded.programs:echo"
PATIENCE_S = 60.0


def start(setup: bytes = b"") -> BoundedProcess:
    return BoundedProcess(ECHO, setup, 1 << 28)


@pytest.fixture
def process() -> Iterator[BoundedProcess]:
    process = start(b"<")
    yield process
    process.close()
    assert not process.is_alive


def test_questions_and_answers_of_any_size_arrive_whole(process: BoundedProcess) -> None:
    for question in (b"", b"a\nb\0", os.urandom(9 << 20), b"again"):
        assert process.ask(question, PATIENCE_S) == b"<" + question


@pytest.mark.parametrize(("question", "limit"), [(b"loop", "time"), (b"grow", "memory"), (b"recurse", "memory")])
def test_what_goes_over_a_limit_ends_its_process(process: BoundedProcess, question: bytes, limit: str) -> None:
    with pytest.raises(LimitExceeded) as caught:
        process.ask(question, 0.2 if limit == "time" else PATIENCE_S)
    assert caught.value.limit == limit
    assert not process.is_alive


def test_what_a_program_prints_is_no_answer(process: BoundedProcess) -> None:
    assert process.ask(b"print", PATIENCE_S) == b"<print"
    assert process.ask(b"next", PATIENCE_S) == b"<next"


@pytest.mark.parametrize("program", ["tests.bounded.programs:broken", "tests.bounded.nothing:here"])
def test_a_program_that_does_not_start_is_an_error(program: str) -> None:
    process = BoundedProcess(program, b"", 1 << 28)
    with pytest.raises(WorkerError, match="does not start"):
        process.ask(b"", PATIENCE_S)
    assert not process.is_alive


def test_descriptors_may_have_any_number() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this user may not open 2,048 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        with ExitStack() as stack:
            for _ in range(1100):
                stack.enter_context(open(os.devnull, "rb"))
            process = start()
            stack.callback(process.close)
            assert process.ask(b"high", PATIENCE_S) == b"high"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_another_thread_can_stop_it(process: BoundedProcess) -> None:
    process.ask(b"ready", PATIENCE_S)
    threading.Timer(0.1, process.stop).start()
    with pytest.raises(WorkerError, match="shut down"):
        process.ask(b"loop", PATIENCE_S)


def test_an_interrupted_question_leaves_no_answer_for_the_next() -> None:
    pool = ProcessPool(start, 1)
    with pool.process() as process:
        assert process.ask(b"ready", PATIENCE_S) == b"ready"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt), pool.process() as process:
            process.ask(b"loop", PATIENCE_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pool.process() as process:
        assert process.ask(b"next", PATIENCE_S) == b"next"
    pool.close()


def test_who_is_killed_went_over_no_limit(process: BoundedProcess) -> None:
    process.ask(b"ready", PATIENCE_S)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="was killed"):
        process.ask(b"next", PATIENCE_S)


def test_a_system_that_starts_no_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerError, match="does not start: No such file"):
        start()


def test_places_of_modules_may_be_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    process = start()
    assert process.ask(b"a", PATIENCE_S) == b"a"
    process.close()


def test_a_pool_replaces_what_has_ended_and_ends_all() -> None:
    pool = ProcessPool(start, 2)
    with pool.process() as first:
        with pool.process() as second:
            assert first.pid != second.pid
        with pytest.raises(LimitExceeded):
            first.ask(b"loop", 0.1)
    with pool.process() as third:
        assert third.ask(b"ready", PATIENCE_S) == b"ready"
    assert {process.pid for process in pool.idle()} == {second.pid, third.pid}
    pool.close()
    assert [process.is_alive for process in (second, third)] == [False, False]
    with pytest.raises(WorkerError, match="shut down"), pool.process():
        pass


def test_a_pool_that_closes_waits_for_no_question() -> None:
    pool = ProcessPool(start, 1)
    refused: list[Exception] = []

    def ask() -> None:
        try:
            with pool.process() as process:
                process.ask(b"ready", PATIENCE_S)
                asked.set()
                process.ask(b"loop", PATIENCE_S)
        except WorkerError as error:
            refused.append(error)

    asked = threading.Event()
    thread = threading.Thread(target=ask)
    thread.start()
    assert asked.wait(PATIENCE_S)
    pool.close()
    thread.join(PATIENCE_S)
    assert len(refused) == 1
    assert not pool.idle() or not pool.idle()[0].is_alive


def test_it_ends_with_the_process_that_started_it() -> None:
    script = (
        "from quire.platform.bounded.process import BoundedProcess\n"
        f"process = BoundedProcess({ECHO!r}, b'', 1 << 28)\n"
        "process.ask(b'ready', 60)\n"
        "print(process.pid, flush=True)\n"
        "input()\n"
    )
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while is_running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Say whether a process is there, and no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
