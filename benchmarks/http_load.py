"""The cost of HTTP: `python -m benchmarks.http_load`.

For each number of streams, in turns: `quire bench` in a process of its own, then the same requests at once over HTTP,
as streams of `/v1/completions` from this process to `quire serve`. Then 1,000 clients at once, to a server whose queue
is short, and one request after them. With `--fronts 0 1 2`, servers with so many front processes take turns in each
round. The processor times do not depend on what else the machine does: of the server's main thread, which speaks HTTP
where there are no fronts, of the engine's with all others, of all fronts together, and of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine
from quire.bench.percentiles import percentiles
from quire.bench.workloads import BenchRequest, SyntheticWorkload

MARKS = {"of_in_process": 0.95, "p99_of_median": 3.0, "slowest_of_fastest": 1.5}
IDS = range(256, 2048)
INPUT_LEN, MAX_NUM_SEQS, QUEUE_LEN = 32, 256, 256
ENV = os.environ | {"HF_HUB_OFFLINE": "1"}
EVENT = re.compile(rb"data: (\{.*?\})\n\n")
RECOVERED_S = 1.0
TIMEOUT_S = 120.0


class Answer(NamedTuple):
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


class Exchange(asyncio.Protocol):
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

    def answer(self) -> Answer:
        """Return what has arrived."""
        head, _, _ = b"".join(self._reads[:4]).partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1.1 (\d+)", head)
        retry_after = re.search(rb"(?i)\r\nretry-after: *(\S+)", head)
        ends = list(accumulate(map(len, self._reads)))
        pieces, num_new = [], 0
        for match in EVENT.finditer(b"".join(self._reads)):
            event = json.loads(match[1])
            if event["choices"] and event["choices"][0]["text"]:
                pieces.append(self._times[bisect_left(ends, match.end())])
            if event.get("usage"):
                num_new = event["usage"]["completion_tokens"]
        return Answer(
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
    """

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def send_all(self, requests: Sequence[BenchRequest]) -> list[Answer]:
        """Send all requests at once and return their answers."""
        return asyncio.run(self._send_all([self._encode(request) for request in requests]))

    def cpu_s(self) -> dict[str, float]:
        """Return the processor times of the main thread, of all others, of the front processes, and of this process."""
        task = Path(f"/proc/{self.process.pid}/task")
        times = {each.name: _cpu_s(each) for each in task.iterdir()}
        main = times.pop(str(self.process.pid))
        return {
            "main_thread": main,
            "engine": sum(times.values()),
            "fronts": sum(_cpu_s(Path(f"/proc/{child}")) for child in self._fronts()),
            "client": time.process_time(),
        }

    def memory_mib(self) -> dict[str, list[float]]:
        """Return the proportional memory of the server's process, and of each of its fronts."""
        return {"server": [_pss_mib(str(self.process.pid))], "fronts": list(map(_pss_mib, self._fronts()))}

    def _fronts(self) -> list[str]:
        """Return the ids of the front processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [child for child in children if b"front_process" in Path(f"/proc/{child}/cmdline").read_bytes()]

    async def _send_all(self, requests: Sequence[bytes]) -> list[Answer]:
        loop = asyncio.get_running_loop()
        waits: list[asyncio.Future[None]] = [loop.create_future() for _ in requests]
        pairs = zip(requests, waits, strict=True)
        exchanges = [Exchange(request, done) for request, done in pairs]
        opening = [loop.create_connection(lambda each=each: each, "127.0.0.1", self.port) for each in exchanges]  # type: ignore[misc]
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*opening)
            await asyncio.gather(*waits)
        return [exchange.answer() for exchange in exchanges]

    def _encode(self, request: BenchRequest) -> bytes:
        fields = {"prompt": request.prompt, "max_tokens": request.num_new, "temperature": 0.0, "ignore_eos": True}
        body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


@contextmanager
def served(*options: str) -> Iterator[Server]:
    """Start a server of the bundled model, and end it."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--log-interval", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENV) as process:
        try:
            assert process.stdout is not None
            address = next((line for line in process.stdout if line.startswith("Quire serves")), None)
            if address is None:
                raise RuntimeError(f"{' '.join(command)} ended with status {process.wait()}")
            yield Server(process, int(address.strip().rpartition(":")[2]))
        finally:
            process.terminate()


def in_process(num_streams: int, output_len: int, seed: int) -> dict[str, Any]:
    """Return the report of `quire bench`, with texts."""
    command = [sys.executable, "-m", "quire", "bench", "--json", "--no-skip-tokenizer-init"]
    command += ["--num-prompts", str(num_streams), "--input-len", str(INPUT_LEN), "--output-len", str(output_len)]
    command += ["--max-num-seqs", str(MAX_NUM_SEQS), "--workload-seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENV)
    report: dict[str, Any] = json.loads(done.stdout)["report"]
    return report


def over_http(server: Server, num_streams: int, output_len: int, seed: int) -> dict[str, Any]:
    """Return the figures of one load of streams."""
    workload = SyntheticWorkload(
        num_prompts=num_streams, input_len=INPUT_LEN, output_len=output_len, workload_seed=seed
    )
    before = server.cpu_s()
    answers = server.send_all(workload.requests(IDS))
    used_s = {name: after - before[name] for name, after in server.cpu_s().items()}
    num_new = sum(answer.num_new for answer in answers)
    if num_new != num_streams * output_len:
        statuses = Counter(answer.status for answer in answers)
        raise RuntimeError(f"wanted {num_streams * output_len} new tokens, got {num_new}; statuses {statuses}")
    begun_s = min(answer.sent_s for answer in answers)
    times = [answer.ended_s - answer.sent_s for answer in answers]
    gaps = percentiles([later - earlier for answer in answers for earlier, later in pairwise(answer.pieces_s)])
    return {
        "output_tokens_per_s": num_new / (max(answer.ended_s for answer in answers) - begun_s),
        "inter_token_latency_s": gaps,
        "p99_of_median": gaps["p99"] / gaps["p50"],
        "slowest_of_fastest": max(times) / min(times),
        **{f"{name}_us_per_token": 1e6 * seconds / num_new for name, seconds in used_s.items()},
        "num_pieces": sum(len(answer.pieces_s) for answer in answers),
    }


def crowd(num_clients: int) -> dict[str, Any]:
    """Return what became of many clients at once, and how long one request took afterwards."""
    with served("--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue-len", str(QUEUE_LEN)) as server:
        one = SyntheticWorkload(num_prompts=1, input_len=INPUT_LEN, output_len=8).requests(IDS)
        server.send_all(one)
        workload = SyntheticWorkload(num_prompts=num_clients, input_len=INPUT_LEN, output_len=32, workload_seed=1)
        answers = server.send_all(workload.requests(IDS))
        (after,) = server.send_all(one)
    refused = [answer for answer in answers if answer.status == 429]
    whole = [answer for answer in answers if answer.status == 200 and answer.num_new == 32]
    return {
        "clients": num_clients,
        "served": len(whole),
        "refused": len(refused),
        "refused_without_retry_after": sum(answer.retry_after is None for answer in refused),
        "others": num_clients - len(whole) - len(refused),
        "seconds_of_a_request_afterwards": after.ended_s - after.sent_s,
        "is_met": len(whole) + len(refused) == num_clients
        and all(answer.retry_after for answer in refused)
        and after.ended_s - after.sent_s < RECOVERED_S,
    }


def compare(num_streams: int, output_len: int, num_runs: int, fronts: Sequence[int]) -> list[dict[str, Any]]:
    """Return the figures of all sides for each number of fronts: medians of runs in turns, and which marks are met."""
    runs: dict[int, list[dict[str, Any]]] = {count: [] for count in fronts}
    memory = {}
    with ExitStack() as stack:
        flags = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue-len", "1024")
        servers = {count: stack.enter_context(served(*flags, "--api-server-count", str(count))) for count in fronts}
        for count, server in servers.items():
            over_http(server, num_streams, 8, seed=1000)  # connections, buffers and code are warm
            memory[count] = server.memory_mib()
        for seed in range(1, num_runs + 1):
            alone = in_process(num_streams, output_len, seed)
            gaps = alone["inter_token_latency_s"]
            for count, server in servers.items():
                run = over_http(server, num_streams, output_len, seed)
                run["in_process_tokens_per_s"] = alone["output_tokens_per_s"]
                run["of_in_process"] = run["output_tokens_per_s"] / alone["output_tokens_per_s"]
                run["in_process_p99_of_median"] = gaps["p99"] / gaps["p50"]
                shown = {name: round(value, 2) for name, value in run.items() if isinstance(value, float)}
                print(num_streams, "streams,", count, "fronts:", shown, flush=True)
                runs[count].append(run)
    return [_summary(num_streams, output_len, count, runs[count], memory[count]) for count in fronts]


def _summary(
    num_streams: int, output_len: int, fronts: int, runs: list[dict[str, Any]], memory: dict[str, list[float]]
) -> dict[str, Any]:
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name in MARKS}
    is_met = {name: middle[name] >= mark if mark < 1 else middle[name] <= mark for name, mark in MARKS.items()}
    return {
        "streams": num_streams,
        "output_len": output_len,
        "fronts": fronts,
        "medians": middle,
        "is_met": is_met,
        "memory_mib": memory,
        "runs": runs,
    }


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fronts", type=int, nargs="*", default=[0], help="numbers of front processes, in turns")
    parser.add_argument("--clients", type=int, default=1000, help="0 leaves the crowd out")
    parser.add_argument("--name", default="http_load", help="name of the file of results")
    options = parser.parse_args()
    loads = []
    for count in options.streams:
        loads += compare(count, options.output_len, options.runs, options.fronts)
    for load in loads:
        print(f"{load['streams']} streams, {load['fronts']} fronts: {load['medians']}, met: {load['is_met']}")
        print(f"  memory in MiB: {load['memory_mib']}")
    figures: dict[str, Any] = {"marks": MARKS, "loads": loads}
    if options.clients:
        figures["crowd"] = crowd(options.clients)
        print(f"crowd: {figures['crowd']}")
    print(machine.save(options.name, figures))


def _cpu_s(task: Path) -> float:
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_mib(process: str) -> float:
    """Return the memory of a process in MiB, of what it shares with others its part."""
    found = re.search(r"(?m)^Pss: +(\d+) kB", Path(f"/proc/{process}/smaps_rollup").read_text())
    return int(found[1]) / 1024 if found else 0.0


if __name__ == "__main__":
    main()
