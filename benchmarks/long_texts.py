"""The cost of bodies of 8 MB for other requests: `python -m benchmarks.long_texts`.

Starts a server, sends it one body after the other, each of another kind, and meanwhile asks `/health` again and again
and reads one small stream after the other, from a process of its own. Two models: the bundled one, whose context is so
short that most of these texts are refused, and one with random weights and room for all of them. Delays are those of
the slowest answer and of the longest gap in a stream while a body was there; beside them, the same without any. Memory
is what the server and the processes that it started have, together.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks import machine, make_model
from quire.models.checkpoints.checkpoint import locate

MAX_BYTES = 8 << 20
MARK_S, MARK_BYTES = 0.1, 64 << 20
PAUSE_S, SAMPLE_S, SETTLE_S = 0.02, 0.05, 2.0
QUIET_S = 10.0
LONG_CONTEXT = MAX_BYTES + 1024
# Its layers are as small as can be: what is measured is not the model.
LONG: dict[str, Any] = make_model.LLAMA | {
    "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": LONG_CONTEXT, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
PROSE = "The fox, 12 of them, said hello. \n"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def filled(text: str) -> str:
    """Repeat a text until a body of it is almost as long as may be."""
    return text * ((MAX_BYTES - 4096) // len(json.dumps(text, ensure_ascii=False).encode()[1:-1]))


def bodies() -> Iterator[tuple[str, str, Any]]:
    """Yield a name, a route and a body for each kind."""
    texts = {
        "prose": filled(PROSE),
        "one letter": filled("a"),
        "Chinese": filled("今天天气很好"),
        "lines": filled("x\r"),
    }
    for name, text in texts.items():
        for route in ("/tokenize", COMPLETIONS):
            yield f"{name} to {route}", route, {"prompt": text, "max_tokens": 1}
    yield "prose in a chat", CHAT, {"messages": [{"role": "user", "content": texts["prose"]}], "max_tokens": 1}
    many = [{"role": "user", "content": PROSE * 50}] * 4096
    yield "4,096 messages", CHAT, {"messages": many, "max_tokens": 1}
    parts = [{"type": "text", "text": "ab"}] * 200_000
    yield "200,000 parts", CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    yield "prose to tokenize, as a chat", "/tokenize", {"messages": [{"role": "user", "content": texts["prose"]}]}
    yield "prose to pin", "/pin_prefix", {"name": "a", "prompt": texts["prose"]}
    yield "256 prompts", COMPLETIONS, {"prompt": [PROSE * 800] * 256, "max_tokens": 1}
    ids = [1] * (MAX_BYTES // 3 - 4096)
    yield "ids to complete", COMPLETIONS, {"prompt": ids, "max_tokens": 1}
    yield "lists of ids", COMPLETIONS, {"prompt": [[7] * 10_000] * 250, "max_tokens": 1}
    yield "ids to detokenize", "/detokenize", {"tokens": ids}
    yield "allowed ids", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "allowed_token_ids": ids}
    words = [f"{idx} " + "word " * 200 for idx in range(1024)]
    yield "bad words", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "bad_words": words}
    yield "stop strings", COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stop": filled("word ")}
    yield "fields", COMPLETIONS, {"prompt": "a"} | {f"{idx:06}": 1 for idx in range(600_000)}
    yield "lists in lists", COMPLETIONS, {"prompt": [[[]]] * 1_000_000}
    yield "objects", COMPLETIONS, {"prompt": "a", "logit_bias": [{"a": {}}] * 700_000}
    yield "tools", CHAT, {"messages": [], "tools": [{"a": {}}] * 700_000}


def encoded(body: Any) -> bytes:
    """Return a body as it is sent, cut to what may be sent."""
    raw = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    if len(raw) > MAX_BYTES:
        raise ValueError(f"{len(raw)} bytes are more than a body may have")
    return raw


# ---- the process that watches ----


def watch(url: str) -> None:
    """Note how long answers of `/health` and gaps in streams take, until standard input ends; print them."""
    ended = threading.Event()
    noted: dict[str, list[tuple[float, float]]] = {"health": [], "stream": []}
    threads = [threading.Thread(target=each, args=(url, ended, noted)) for each in (_ask, _stream)]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    ended.set()
    for thread in threads:
        thread.join()
    json.dump(noted, sys.stdout)


def _ask(url: str, ended: threading.Event, noted: dict[str, list[tuple[float, float]]]) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    while not ended.is_set():
        began = time.monotonic()
        connection.request("GET", "/health")
        connection.getresponse().read()
        noted["health"].append((began, time.monotonic() - began))
        time.sleep(PAUSE_S)


def _stream(url: str, ended: threading.Event, noted: dict[str, list[tuple[float, float]]]) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 64, "ignore_eos": True, "stream": True}).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    while not ended.is_set():
        last = time.monotonic()
        connection.request("POST", COMPLETIONS, body, {"content-type": "application/json"})
        answer = connection.getresponse()
        while answer.readline():
            now = time.monotonic()
            noted["stream"].append((last, now - last))
            last = now


# ---- the process that sends ----


class BodyCost(NamedTuple):
    """One body: its name, the status of the answer, when it was sent and answered, and memory."""

    name: str
    status: int
    began_s: float
    ended_s: float
    before_bytes: int
    peak_bytes: int
    after_bytes: int


def family(pid: int) -> set[int]:
    """Return a process and all that it started."""
    own = {pid}
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in thread.read_text(encoding="ascii").split():
            own |= family(int(child))
    return own


def resident_bytes(pids: set[int]) -> int:
    """Return the memory of processes."""
    num_pages = 0
    for pid in pids:
        with suppress(OSError):
            num_pages += int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def send(url: str, pid: int, name: str, route: str, raw: bytes) -> BodyCost:
    """Send a body and wait for the answer."""
    before, peak, is_over = resident_bytes(family(pid)), [0], threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_S):
            peak[0] = max(peak[0], resident_bytes(family(pid)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=600)
    began = time.monotonic()
    connection.request("POST", route, raw, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    ended = time.monotonic()
    connection.close()
    time.sleep(SETTLE_S)
    is_over.set()
    sampler.join()
    return BodyCost(name, answer.status, began, ended, before, peak[0], resident_bytes(family(pid)))


def longest(noted: list[tuple[float, float]], began_s: float, ended_s: float) -> float:
    """Return the longest of what lay in a time at least in part."""
    return max((took for at, took in noted if at < ended_s + 0.5 and at + took > began_s), default=0.0)


@contextmanager
def serving(model: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Start a server; yield its address and process id."""
    command = [str(Path(sys.executable).with_name("quire")), "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "http://" in line)
            yield line[line.index("http://") :].split()[0], process.pid
        finally:
            process.send_signal(signal.SIGTERM)


def measure(model: str, flags: tuple[str, ...], names: str = "", routes: tuple[str, ...] = ("/",)) -> dict[str, Any]:
    """Send every kind of body, of those routes, to a server of a model, and return what it cost."""
    with serving(model, *flags) as (url, pid):
        # All memory that streams can fill is filled by the first of them.
        watcher = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.long_texts", "--watch", url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        # Modules and processes that start at the first use are no cost of a body.
        for route in ("/tokenize", COMPLETIONS):
            send(url, pid, "warm", route, encoded({"prompt": PROSE * 4000, "max_tokens": 1}))
        send(url, pid, "warm", CHAT, encoded({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}))
        send(url, pid, "warm", "/detokenize", encoded({"tokens": [[]] * 80_000}))
        first = resident_bytes(family(pid))
        quiet = time.monotonic()
        time.sleep(QUIET_S)
        cases = []
        for name, route, body in bodies():
            if names in name and route.startswith(routes):
                cases.append(send(url, pid, name, route, encoded(body)))
        last = resident_bytes(family(pid))
        noted = json.loads(watcher.communicate()[0])
    alone = {kind: [took for at, took in of if quiet <= at <= quiet + QUIET_S] for kind, of in noted.items()}
    return {
        "quiet": {kind: {"median_s": statistics.median(of), "longest_s": max(of)} for kind, of in alone.items()},
        "bodies": [
            {
                "body": case.name,
                "status": case.status,
                "answered_s": case.ended_s - case.began_s,
                "health_s": longest(noted["health"], case.began_s, case.ended_s),
                "gap_s": longest(noted["stream"], case.began_s, case.ended_s),
                "more_at_peak_bytes": case.peak_bytes - case.before_bytes,
                "more_after_bytes": case.after_bytes - case.before_bytes,
            }
            for case in cases
        ],
        "more_at_the_end_bytes": last - first,
    }


def show(title: str, runs: list[dict[str, Any]]) -> None:
    """Print the figures of one model: medians, and the longest of all runs."""

    def of(rows: list[dict[str, Any]], name: str, unit: float) -> str:
        values = [row[name] / unit for row in rows]
        return f"{statistics.median(values):5.0f} ({max(values):4.0f})"

    print(title)
    for kind in ("health", "stream"):
        print(f"  without a body, {kind}: {of([run['quiet'][kind] for run in runs], 'longest_s', 1e-3)} ms at most")
    print(f"  {'body':29} status answered s   /health ms      gap ms    MiB at peak        after")
    for rows in zip(*(run["bodies"] for run in runs), strict=True):
        answered = statistics.median(row["answered_s"] for row in rows)
        delays = f"{of([*rows], 'health_s', 1e-3)} {of([*rows], 'gap_s', 1e-3)}"
        memory = f"{of([*rows], 'more_at_peak_bytes', 1 << 20)} {of([*rows], 'more_after_bytes', 1 << 20)}"
        print(f"  {rows[0]['body']:29} {rows[0]['status']:6} {answered:10.2f} {delays}  {memory}")
    print(f"  at the end {of(runs, 'more_at_the_end_bytes', 1 << 20)} MiB more than at the beginning")


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    parser.add_argument("--bodies", default="", help="only those with this in their name; saves nothing")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    if options.watch:
        watch(options.watch)
        return
    folder = make_model.FOLDER / "long-context"
    if not make_model.is_written(folder):
        make_model.write(LONG, folder)
    flags = ("--max-model-len", str(LONG_CONTEXT), "--tokenizer", str(locate("bundled")))
    # A prompt that fits is computed: that is time of the model, not of the text.
    routes = ("/tokenize", "/detokenize", "/pin_prefix")
    setups: dict[str, tuple[Any, ...]] = {
        "long_context": (str(folder), (*flags, "--kv-cache-memory-bytes", "1GiB"), options.bodies, routes),
        "bundled": ("bundled", ("--pin-limit", "0.2", "--num-kv-blocks", "256"), options.bodies),
    }
    figures = {name: [measure(*setup) for _ in range(options.runs)] for name, setup in setups.items()}
    for name, runs in figures.items():
        show(f"{name}: medians of {options.runs} runs (and the most)", runs)
    if not options.bodies:
        print(machine.save("long_texts", {"mark_s": MARK_S, "mark_bytes": MARK_BYTES, **figures}))


if __name__ == "__main__":
    main()
