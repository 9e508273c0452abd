"""The two sides of `benchmarks.http_load`: servers with a client for them, and the engine without HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

from quire.measurement.bench.probe import ProbedRates
from quire.measurement.bench.workloads import BenchRequest, SyntheticWorkload, Workload

IDS = range(256, 2048)
INPUT_LEN, MAX_NUM_SEQS = 32, 256
ENV = os.environ | {"HF_HUB_OFFLINE": "1"}
EVENT = re.compile(rb"data: (\{.*?\})\n\n")
START_TIMEOUT_S, END_TIMEOUT_S = 180.0, 20.0


class StreamedAnswer(NamedTuple):
    """The answer to one request.

    Args:
        status: HTTP status; 0 where the connection was lost.
        retry_after: value of the header `Retry-After`, None without one.
        sent_s, ended_s: times of the request and of the end of the answer.
        pieces_s: arrival times of the events with text.
        num_new: number of new tokens by the answer's usage.
    """

    status: int
    retry_after: str | None
    sent_s: float
    ended_s: float
    pieces_s: list[float]
    num_new: int


class StreamExchange(asyncio.Protocol):
    """One request on a connection of its own.

    While answers arrive it only keeps the bytes with their times, since it shares the machine with the server.

    Args:
        request: bytes of the request.
        done: future that is resolved at the end of the answer.
    """

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request = request
        self._done = done
        self._sent_s = self._ended_s = 0.0
        self._times: list[float] = []
        self._reads: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._sent_s = time.perf_counter()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Keep what has arrived."""
        self._times.append(time.perf_counter())
        self._reads.append(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Resolve the future."""
        self._ended_s = time.perf_counter()
        if not self._done.done():
            self._done.set_result(None)

    def answer(self) -> StreamedAnswer:
        """Return what has arrived."""
        head, _, body = b"".join(self._reads).partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1.1 (\d+)", head)
        retry_after = re.search(rb"(?i)\r\nretry-after: *(\S+)", head)
        ends = list(accumulate(map(len, self._reads)))
        pieces, num_new = [], 0
        if usage := re.search(rb'"completion_tokens":(\d+)', body):  # of an answer in one piece
            num_new = int(usage[1])
        for match in EVENT.finditer(b"".join(self._reads)):
            event = json.loads(match[1])
            if event["choices"] and event["choices"][0]["text"]:
                pieces.append(self._times[bisect_left(ends, match.end())])
            if event.get("usage"):
                num_new = event["usage"]["completion_tokens"]
        return StreamedAnswer(
            status=int(status[1]) if status else 0,
            retry_after=retry_after[1].decode() if retry_after else None,
            sent_s=self._sent_s,
            ended_s=self._ended_s,
            pieces_s=pieces,
            num_new=num_new,
        )


class Server:
    """A running `quire serve`.

    Args:
        process: its process.
        port: its port.

    Attributes:
        streams: True to ask for streams, False for answers in one piece.
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port
        self.streams = True

    def send_all(self, requests: Sequence[BenchRequest], timeout_s: float) -> list[StreamedAnswer]:
        """Send all requests at once and return their answers.

        Raises:
            TimeoutError: they did not end in time.
        """
        return asyncio.run(self._send_all([self._encode(request) for request in requests], timeout_s))

    def cpu_s(self) -> dict[str, float]:
        """Return the processor times of the main thread, of all others, and of this process."""
        task = Path(f"/proc/{self.process.pid}/task")
        times = {each.name: _cpu_s(each) for each in task.iterdir()}
        main = times.pop(str(self.process.pid))
        return {
            "main_thread": main,
            "engine": sum(times.values()),
            "client": time.process_time(),
        }

    def memory_mib(self) -> float:
        """Return the memory of the server's process; of what it shares with others, its part."""
        found = re.search(r"(?m)^Pss: +(\d+) kB", Path(f"/proc/{self.process.pid}/smaps_rollup").read_text())
        return int(found[1]) / 1024 if found else 0.0

    async def _send_all(self, requests: Sequence[bytes], timeout_s: float) -> list[StreamedAnswer]:
        loop = asyncio.get_running_loop()
        waits: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
        pairs = zip(requests, waits, strict=True)
        exchanges = [StreamExchange(request, done) for request, done in pairs]
        opening = [loop.create_connection(lambda each=each: each, "127.0.0.1", self.port) for each in exchanges]  # type: ignore[misc]
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*opening)
            await asyncio.gather(*waits)
        return [exchange.answer() for exchange in exchanges]

    def _encode(self, request: BenchRequest) -> bytes:
        fields = {"prompt": request.prompt, "max_tokens": request.num_new, "temperature": 0.0, "ignore_eos": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}} if self.streams else {}
        body = json.dumps({**fields, **stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


@contextmanager
def served(*options: str) -> Iterator[Server]:
    """Start a server of the bundled model, and end it, whatever happens.

    Raises:
        RuntimeError: the server did not start; the end of its log is part of the message.
    """
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--log-interval", "0", *options]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=ENV)
        try:
            assert process.stdout is not None
            address = _line(process.stdout, START_TIMEOUT_S)
            if not address.startswith("Quire serves"):
                log.seek(0)
                raise RuntimeError(f"{' '.join(command)} said {address!r}, and logged:\n{log.read()[-2000:]}")
            yield Server(process, int(address.strip().rpartition(":")[2]))
        finally:
            _end(process)


class InProcess:
    """The engine of `quire bench`, with texts, in a process of its own that measures when it is asked to.

    Args:
        process: that process; it answers a line of JSON with another one.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def measure(self, num_streams: int, output_len: int, seed: int, timeout_s: float) -> dict[str, Any]:
        """Return the report of `quire bench` on one workload, and the processor time for each token.

        Raises:
            RuntimeError: the process has ended, or does not answer in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([num_streams, output_len, seed]), file=self._process.stdin, flush=True)
        answer = _line(self._process.stdout, timeout_s)
        if not answer:
            raise RuntimeError(f"the engine without HTTP did not answer within {timeout_s:g} s")
        report: dict[str, Any] = json.loads(answer)
        return report


@contextmanager
def in_process() -> Iterator[InProcess]:
    """Start the engine without HTTP, and end it."""
    command = [sys.executable, "-m", "benchmarks.http_load_server"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV)
    try:
        yield InProcess(process)
    finally:
        _end(process)


def workload(num_streams: int, output_len: int, seed: int) -> list[BenchRequest]:
    """Return the requests of one load."""
    made = SyntheticWorkload(num_prompts=num_streams, input_len=INPUT_LEN, output_len=output_len, workload_seed=seed)
    return made.requests(IDS)


def answer_measurements() -> None:
    """Measure each workload that standard input asks for; the program of `InProcess`."""
    from quire.config import EngineConfig
    from quire.measurement.bench.measure import EngineBench

    config = EngineConfig.from_options(model="bundled", skip_tokenizer_init=False, max_num_seqs=MAX_NUM_SEQS)
    # The rates of the machine are measured by `quire bench` for its bound, which no figure here needs.
    bench = EngineBench(config, probe=lambda *_: ProbedRates(1.0, 1.0, 1.0))
    bench.measure(Workload(workload(8, 8, seed=0), before=[]))
    for line in sys.stdin:
        num_streams, output_len, seed = json.loads(line)
        used_s = time.process_time()
        report = asdict(bench.measure(Workload(workload(num_streams, output_len, seed), before=[])))
        report["us_per_token"] = 1e6 * (time.process_time() - used_s) / (num_streams * output_len)
        print(json.dumps(report), flush=True)


def _line(output: IO[str], timeout_s: float) -> str:
    """Return the next line, which its writer flushes alone; an empty text at the end, or where none comes in time."""
    return output.readline() if select.select([output], [], [], timeout_s)[0] else ""


def _end(process: subprocess.Popen[str]) -> None:
    """End a process, by force where it takes long."""
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _cpu_s(task: Path) -> float:
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    answer_measurements()
