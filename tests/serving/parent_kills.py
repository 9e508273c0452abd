"""Kills of commands at random moments, which no process that they have started may outlive.

python -m tests.serving.parent_kills --kills 100 --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Final

import httpx

from tests.server import checkpoint
from tests.serving.processes import ProcessTree

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 300.0
# Time after which no process may be left.
END_S: Final = 5.0
PARENTS: Final = {
    "server": (),
    "ranks": ("--tensor-parallel-size", "2"),
    "replicas": ("--replicas", "2"),
}
MOMENTS: Final = ("start", "idle", "load", "stop")
USER: Final = [{"role": "user", "content": "Z"}]
# A stream, a chat by a template, and one under a grammar: the processes of each kind run.
BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "Z", "max_tokens": 2000, "ignore_eos": True, "stream": True}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 20}),
    ("/v1/completions", {"prompt": "Z", "max_tokens": 200, "structured_outputs": {"regex": "(a|b){50,100}"}}),
)


def kill(kind: str, moment: str, folder: Path, rng: random.Random) -> tuple[int, list[str]]:
    """Start a command and kill it at a random moment.

    Returns:
        The number of processes that ran, and the commands of those that are left.
    """
    tree = ProcessTree()
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **tree.environ}
    command = [sys.executable, "-m", "quire", "serve", str(folder), "--port", "0", "--num-threads", "1"]
    command += ["--num-kv-blocks", "300", "--served-model-name", "tiny", *PARENTS[kind]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env, text=True)
    is_over = threading.Event()
    threads: list[threading.Thread] = []
    with process:
        try:
            assert process.stdout is not None
            if moment == "start":
                # The time in which a command starts, whatever the machine: its end is when it prints its address.
                select.select([process.stdout], [], [], rng.uniform(0, 10))
            else:
                url = _address(process)
                if moment in ("load", "stop"):
                    threads = [
                        threading.Thread(target=_load, args=(url, path, body, is_over)) for path, body in BODIES * 2
                    ]
                    for thread in threads:
                        thread.start()
                time.sleep(rng.uniform(0, 2))
                if moment == "stop":
                    process.send_signal(signal.SIGTERM)
                    time.sleep(rng.uniform(0, 0.5))
            num_processes = len(tree.pids())
            process.kill()
            process.wait()
            is_over.set()
            return num_processes, tree.wait_until_ended(END_S)
        finally:
            is_over.set()
            process.kill()
            tree.kill()
            for thread in threads:
                thread.join()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    match = re.search(r"http://\S+", process.stdout.readline())
    timer.cancel()
    assert match, "the command ended before it served"
    return match[0]


def _load(url: str, path: str, body: dict[str, Any], is_over: threading.Event) -> None:
    """Send requests, one after the other, until the server is gone."""
    with httpx.Client(base_url=url, timeout=60) as http:
        while not is_over.is_set():
            with suppress(httpx.HTTPError), http.stream("POST", path, json={"model": "tiny", **body}) as answer:
                for _ in answer.iter_raw():
                    pass
            time.sleep(0.01)


def kinds() -> Iterator[tuple[str, str]]:
    """Yield all kinds of commands and moments, again and again."""
    while True:
        yield from product(PARENTS, MOMENTS)


def main() -> int:
    """Kill so many commands, print what was left, and fail if something was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(Path(folder) / "tiny")
        for number, (kind, moment) in zip(range(args.kills), kinds(), strict=False):
            num_processes, left = kill(kind, moment, Path(folder) / "tiny", random.Random(f"{args.seed} {number}"))
            counts.update(kills=1, processes=num_processes, left=len(left))
            counts[f"{kind} at {moment}"] += 1
            print(f"{number}: {kind} at {moment}: {num_processes} processes, left {left}", flush=True)
    print(json.dumps(counts))
    return bool(counts["left"])


if __name__ == "__main__":
    sys.exit(main())
