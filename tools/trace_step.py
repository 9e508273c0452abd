"""Trace what users run: `python -m tools.trace_step [KIND [calls]]`, with the bundled model on a CPU.

Kinds:
    greedy: a decode step of a greedy request, in which its sequence gets a new block (the default).
    sampled: the same with a temperature and top_p.
    asynchronous: the same as greedy with asynchronous scheduling, from one step's launch to the next.
    prompt: the first step of a prompt of 10 tokens.
    chat: a streamed chat over HTTP, from its connection to its last byte, all threads of the server.
    all: the counts of every kind.

The output has the files with their lines of code (without docstrings, comments and blank lines) and functions, in the
order of their first call; then the totals. Changes of file are those between consecutive calls of a thread, and for a
greedy step also those within `Scheduler.plan` and `Scheduler.update_from_results`, for one sequence and for four (a
loop over sequences repeats them).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import quire
from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.scheduling.scheduler import Scheduler
from quire.server.http.address import bind_server
from quire.server.settings import ServerConfig
from tools.count_lines import count

PACKAGE = Path(quire.__file__).resolve().parent
CONTROL_PLANE = ("memory", "scheduling", "sequences")
BLOCK_SIZE = 16
# The kinds, with what a request of each asks for.
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "asynchronous": {},
    "prompt": {},
    "chat": {},
}


class TracedCall(NamedTuple):
    """A call of a function of the package.

    Args:
        path: path of its file relative to the package, with slashes.
        function: qualified name of the function; a comprehension or generator counts as its enclosing function.
        is_control: True for the control plane within `Scheduler.plan` or `Scheduler.update_from_results`.
        thread: id of its thread.
    """

    path: str
    function: str
    is_control: bool
    thread: int


class Trace:
    """Records calls of all threads that start after it, while it is on.

    Attributes:
        calls: the calls so far, in order.
        is_on: True while calls are recorded.
    """

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []
        self.is_on = False
        self._depths: dict[int, int] = {}  # of calls of the scheduler, by thread

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread and those that it starts."""
        previous = sys.getprofile()
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        try:
            yield
        finally:
            sys.setprofile(previous)
            threading.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not self.is_on or not code.co_filename.startswith(f"{PACKAGE}/"):
            return
        thread = threading.get_ident()
        is_entry = code in (Scheduler.plan.__code__, Scheduler.update_from_results.__code__)
        depth = self._depths.get(thread, 0)
        if event == "return":
            self._depths[thread] = max(depth - is_entry, 0)
            return
        self._depths[thread] = depth = depth + is_entry
        path = code.co_filename[len(f"{PACKAGE}/") :]
        is_control = depth > 0 and path.split("/")[0] in CONTROL_PLANE
        self.calls.append(TracedCall(path, code.co_qualname.split(".<locals>")[0], is_control, thread))


def trace_step(num_requests: int, kind: str = "greedy") -> list[TracedCall]:
    """Return the calls of a step in order.

    Args:
        num_requests: number of sequences.
        kind: kind of step, not "chat".
    """
    trace = Trace()
    is_ahead = kind == "asynchronous"
    with LLM("bundled", block_size=BLOCK_SIZE, device="cpu", async_scheduling=is_ahead, num_threads=1) as llm:
        engine = llm.engine
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4 * BLOCK_SIZE, "ignore_eos": True, **KINDS[kind]})
        # Prompts of different lengths, so that some sequence gets a new block every few steps.
        prompts = [list(range(10, 20 + 4 * number)) for number in range(num_requests)]
        # Texts of tokens are kept when they are first made: the traced step meets none for the first time.
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False, cache_salt="first")
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
        if kind != "prompt":
            for _ in range(BLOCK_SIZE):
                engine.step()  # the first steps compute the prompts and record the kernels
            sequences = list(engine.scheduler.sequences.values())
            while all(sequence.num_computed % BLOCK_SIZE for sequence in sequences):
                engine.step()
        with trace.installed():
            trace.is_on = True
            engine.step()
            trace.is_on = False
    return trace.calls


def trace_chat() -> list[TracedCall]:
    """Return the calls of a streamed chat over HTTP, in a server of this process; the second one that it answers."""
    from quire.server.lifecycle import serve

    trace = Trace()
    failures: list[BaseException] = []
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "stream": True, "temperature": 0}
    listener = bind_server(ServerConfig(port=0))
    port = listener.getsockname()[1]

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({"model": "bundled", "max_completion_tokens": 12, **body}),
            {"Content-Type": "application/json"},
        )
        answer = connection.getresponse().read()
        assert answer.endswith(b"data: [DONE]\n\n"), answer
        connection.close()

    def run_client() -> None:
        try:
            _wait_for(port)
            ask()
            trace.is_on = True
            ask()
            trace.is_on = False
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    with trace.installed():
        threading.Thread(target=run_client, daemon=True).start()
        serve(EngineConfig.from_options(model="bundled", num_threads=1), ServerConfig(), listener)
    if failures:
        raise failures[0]
    return trace.calls


def _wait_for(port: int) -> None:
    for _ in range(600):
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            connection.getresponse().read()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise TimeoutError(f"no server at port {port}")


def trace(kind: str) -> list[TracedCall]:
    """Return the calls of one of `KINDS`, of one request."""
    return trace_chat() if kind == "chat" else trace_step(1, kind)


@cache
def count_code(path: str) -> int:
    """Return the number of lines of code of a file of the package."""
    return count((PACKAGE / path).read_text(encoding="utf-8")).code


def count_changes(calls: Sequence[TracedCall]) -> int:
    """Return the number of changes of file between consecutive calls of the control plane."""
    control = [call.path for call in calls if call.is_control]
    return sum(first != second for first, second in pairwise(control))


def count_all_changes(calls: Sequence[TracedCall]) -> int:
    """Return the number of changes of file between consecutive calls of each thread."""
    by_thread = sorted(calls, key=lambda call: call.thread)  # stable: the order within a thread stays
    return sum(
        first.path != second.path
        for _, of_thread in groupby(by_thread, key=lambda call: call.thread)
        for first, second in pairwise(of_thread)
    )


class Totals(NamedTuple):
    """The totals of a trace: files, their lines of code, calls, changes of file."""

    files: int
    code: int
    calls: int
    changes: int

    @classmethod
    def of(cls, calls: Sequence[TracedCall]) -> Totals:
        """Count a trace."""
        files = {call.path for call in calls}
        return cls(len(files), sum(map(count_code, files)), len(calls), count_all_changes(calls))


def _shown(kind: str, totals: Totals) -> str:
    files, code, calls, changes = totals
    return f"{kind}: {files} files, {code:,} lines of code, {calls} calls, {changes} changes of file"


def main(kind: str = "greedy", form: str = "files") -> int:
    """Print the walk and its counts, or with the form "calls" each call with its thread."""
    if kind == "all":
        for name in KINDS:
            print(_shown(name, Totals.of(trace(name))))
        return 0
    calls = trace(kind)
    if form == "calls":
        for call in calls:
            print("call", call.path, call.function, call.thread)
        return 0
    functions: dict[str, dict[str, None]] = {}
    for call in calls:
        functions.setdefault(call.path, {})[call.function] = None
    for path, names in functions.items():
        print(f"{count_code(path):5} {path}: {', '.join(names)}")
    totals = Totals.of(calls)
    print(_shown(kind, totals))
    if kind == "greedy":
        control = [call for call in calls if call.is_control]
        print(f"control plane: {len({call.path for call in control})} files, {len(control)} calls")
        print(f"changes of file in it: {count_changes(calls)}, with four sequences {count_changes(trace_step(4))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
