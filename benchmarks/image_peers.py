"""Images over HTTP beside llama-server: `python -m benchmarks.image_peers FILE --llama-server PROGRAM`.

Both servers read the same GGUF files, the model and its `mmproj` in the same folder, and run all the time, idle while
the other one answers. In turns each answers three requests about an image that it has never seen before:

```
first turn    system, image, question                    the encoder runs
second turn   ... + answer, another question             the image is in the prefix of the first turn
other chat    another system message, image, question    the image is not in a prefix
```

What counts is the ratio of medians: the time of the encoder (llama-server's log, Quire's `/metrics`), and the time to
the first token of each request. llama-server keeps its prefix cache, which is on by default.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import random
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine

START_TIMEOUT_S = 300.0
TIMEOUT_S = 600.0
CONTEXT = 8192
# Sides of the images: 1,024 and 4,096 patches of 16x16 pixels.
SIDES = (512, 1024)
# Ratios of the other's times to Quire's.
MARKS = {"encoder": 1.2, "second turn": 5.0}
# Lines of llama-server's log before and after its encoder: minutes, seconds, milliseconds and microseconds.
_STARTS = re.compile(r"^(\d+)\.(\d+)\.(\d+)\.(\d+) I .*encoding mtmd batch", re.MULTILINE)
_ENDS = re.compile(r"^(\d+)\.(\d+)\.(\d+)\.(\d+) I decoding image batch 1/", re.MULTILINE)
_METRIC = re.compile(r"^\S*image_encoder_seconds(?:_total)?(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


def png_url(side: int, rng: random.Random) -> str:
    """Return a data URL of a PNG of random squares."""
    squares = [bytes(rng.randrange(256) for _ in range(3)) for _ in range(64)]
    lines = []
    for row in range(side):
        line = b"".join(squares[8 * (row * 8 // side) + column] * (side // 8) for column in range(8))
        lines.append(b"\0" + line)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"".join(lines))) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + data).decode()


def _seconds(stamp: Sequence[str]) -> float:
    minutes, seconds, milliseconds, microseconds = map(int, stamp)
    return 60 * minutes + seconds + milliseconds / 1e3 + microseconds / 1e6


class TimedServer:
    """A server of this machine, and what it says of its encoder.

    Args:
        name: "quire" or "llama-server".
        port: port of loopback.
        log: file with what it prints.
    """

    def __init__(self, name: str, port: int, log: Path) -> None:
        self.name, self._port, self._log = name, port, log

    def first_token_s(self, messages: list[dict[str, Any]]) -> float:
        """Return the time from sending a request to the first piece of its stream."""
        body = {"model": "m", "messages": messages, "max_tokens": 2, "stream": True, "temperature": 0.0}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        started_s = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"{self.name}: {response.status} {response.read()[:500]!r}")
        first_s = None
        while line := response.readline():
            if line.startswith(b"data: {"):
                # The first event may only name the role.
                said = [
                    each["delta"].get("content") or each["finish_reason"] for each in json.loads(line[6:])["choices"]
                ]
                if first_s is None and any(said):
                    first_s = time.perf_counter() - started_s
        connection.close()
        if first_s is None:
            raise RuntimeError(f"{self.name}: a stream without a token")
        return first_s

    def encoder_s(self) -> float:
        """Return the time of the encoder since the start."""
        if self.name == "llama-server":
            log = self._log.read_text(errors="replace")
            starts, ends = (sum(map(_seconds, pattern.findall(log))) for pattern in (_STARTS, _ENDS))
            return ends - starts
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        connection.request("GET", "/metrics")
        found = _METRIC.search(connection.getresponse().read().decode())
        connection.close()
        if found is None:
            raise RuntimeError("/metrics has no image_encoder_seconds")
        return float(found[1])

    def is_ready(self) -> bool:
        """Return whether it answers."""
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5.0)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


@contextmanager
def serving(name: str, command: list[str], log: Path) -> Iterator[TimedServer]:
    """Start a server, and return it once it answers; it is ended on leaving."""
    port = machine.free_port()
    server = TimedServer(name, port, log)
    with log.open("wb") as out, subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out) as process:
        try:
            until_s = time.perf_counter() + START_TIMEOUT_S
            while not server.is_ready():
                if process.poll() is not None or time.perf_counter() > until_s:
                    raise RuntimeError(f"{command!r} does not serve: {log.read_text(errors='replace')[-2000:]}")
                time.sleep(0.3)
            yield server
        finally:
            process.terminate()


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each server, but its port."""
    threads, context = str(args.threads), str(CONTEXT)
    (mmproj,) = args.file.parent.glob("*mmproj*.gguf")
    quire = [sys.executable, "-m", "quire", "serve", str(args.file), "--num-threads", threads]
    quire += [
        "--max-model-len",
        context,
        "--max-num-seqs",
        "4",
        "--served-model-name",
        "m",
        "--log-level",
        "warning",
        *args.quire_options.split(),
    ]
    llama = [str(args.llama_server), "-m", str(args.file), "--mmproj", str(mmproj), "-t", threads, "-np", "1"]
    llama += ["-c", context, "--host", "127.0.0.1", "--jinja", "-lv", "4"]
    llama += args.llama_options.split()
    return {"quire": quire, "llama-server": llama}


def measure(server: TimedServer, side: int, seed: int) -> dict[str, float]:
    """Send the three requests about one image, and return the times in seconds."""
    rng = random.Random(seed)
    part = {"type": "image_url", "image_url": {"url": png_url(side, rng)}}

    def opening() -> list[dict[str, Any]]:
        return [
            # Each chat has another one, so that it shares no prefix.
            {"role": "system", "content": f"You are assistant {rng.randrange(10**9)}. Answer in one sentence."},
            {"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]},
        ]

    first, other = opening(), opening()
    second = [*first, {"role": "assistant", "content": "Squares."}, {"role": "user", "content": "Of which colours?"}]
    times: dict[str, float] = {}
    for name, messages in (("first turn", first), ("second turn", second), ("other chat", other)):
        before_s = server.encoder_s()
        times[name] = server.first_token_s(messages)
        times[f"encoder, {name}"] = server.encoder_s() - before_s
    times["encoder"] = times.pop("encoder, first turn")
    return times


def main() -> int:
    """Measure in turns, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="model, with its mmproj in the same folder")
    parser.add_argument("--llama-server", type=Path, required=True, help="program, built for this processor")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quire-options", default="")
    parser.add_argument("--llama-options", default="")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    args = parser.parse_args()
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = [
            stack.enter_context(serving(name, command, Path(folder) / f"{name}.log"))
            for name, command in commands(args).items()
        ]
        for server in servers:
            measure(server, SIDES[0], seed=-1)
        for side in SIDES:
            times = results.setdefault(f"{side}x{side}", {server.name: {} for server in servers})
            for number in range(args.rounds):
                for server in servers if number % 2 else servers[::-1]:
                    for name, time_s in measure(server, side, 1000 * side + number).items():
                        times[server.name].setdefault(name, []).append(time_s)
    print(f"{'image':12} {'':22} {'quire':>9} {'llama-server':>13} {'ratio':>7}")
    for image, times in results.items():
        for name in times["quire"]:
            ours, theirs = (statistics.median(times[server][name]) for server in ("quire", "llama-server"))
            ratio = f"{theirs / ours:7.2f}" if ours > 0 else "      -"
            mark = f"  (mark {MARKS[name]})" if name in MARKS else ""
            print(f"{image:12} {name:22} {ours:8.3f}s {theirs:12.3f}s {ratio}{mark}")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine.facts(), "times_s": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
