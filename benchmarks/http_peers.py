"""A file over HTTP beside llama-server: `python -m benchmarks.http_peers FILE --llama-server PROGRAM`.

Both servers run all the time, idle while the other one answers. In turns each gets 16 requests at once, then one alone:
the same tokens of the text of `quire bench quality`, other ones in each round so that no prompt is cached, and greedy
outputs of the same length past the end of the text, as streams of `/v1/completions`. What counts is the ratio of
medians. `--quality` names the file of `benchmarks.quality` that has the KL divergence of both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import machine
from quire.config import EngineConfig
from quire.engine.startup.tokenizers import open_tokenizer
from quire.errors import ServerUnreachable
from quire.measurement.bench.client import COMPLETED, Client
from quire.measurement.bench.http_client import Endpoint
from quire.measurement.bench.load import send_in_turn
from quire.measurement.bench.percentiles import percentiles
from quire.measurement.bench.quality_text import read_quality_text
from quire.measurement.bench.trace import TracedRequest
from quire.models.checkpoints.checkpoint import Checkpoint

NUM_SLOTS = 16
SLOT_TOKENS = 1024
TIMEOUT_S = 300.0
START_TIMEOUT_S = 120.0
# Ratios of output tokens per second, Quire's divided by the peer's.
MARKS = {16: 2.5, 1: 1.1}
# Rows of `benchmarks.quality` that are served here.
ROWS = {"quire": "bfloat16", "llama-server": "llamacpp"}


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each server, but its port."""
    threads = str(args.threads)
    quire = [sys.executable, "-m", "quire", "serve", str(args.file), "--num-threads", threads]
    quire += ["--max-num-seqs", str(NUM_SLOTS), "--max-model-len", str(SLOT_TOKENS), "--log-level", "warning"]
    quire += ["--num-kv-blocks", str(NUM_SLOTS * SLOT_TOKENS // 16), *args.quire_options.split()]
    llama = [str(args.llama_server), "-m", str(args.file), "-t", threads, "-np", str(NUM_SLOTS)]
    llama += ["-c", str(NUM_SLOTS * SLOT_TOKENS), "--host", "127.0.0.1"]
    return {"quire": quire, "llama-server": llama}


@contextmanager
def serving(command: list[str]) -> Iterator[tuple[Client, int]]:
    """Start a server, and return a client of it once it answers, and its process id; it is ended on leaving.

    Raises:
        RuntimeError: it does not start.
    """
    port = machine.free_port()
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    silent = subprocess.DEVNULL
    with subprocess.Popen([*command, "--port", str(port)], stdout=silent, stderr=silent, env=env) as process:
        client = Client(
            Endpoint.parse(f"http://127.0.0.1:{port}"), model=None, api_key=None, timeout_s=TIMEOUT_S, ignore_eos=True
        )
        try:
            asyncio.run(started(client, process))
            yield client, process.pid
        finally:
            process.terminate()


async def started(client: Client, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server answers a completion.

    Raises:
        RuntimeError: it has ended, or does not answer in time.
    """
    until_s = time.perf_counter() + START_TIMEOUT_S
    while time.perf_counter() < until_s and process.poll() is None:
        try:
            await client.check()
            outcome = await client.send(TracedRequest([2, 818, 3823], 2), time.perf_counter())
            if outcome.kind == COMPLETED:
                return
        except ServerUnreachable:
            pass
        await asyncio.sleep(0.3)
    raise RuntimeError(f"{process.args!r} does not serve")


def requests_of(tokens: list[int], count: int, num_prompt: int, num_new: int, seed: int) -> list[TracedRequest]:
    """Return requests with tokens from random places, behind the one that begins a text."""
    rng = random.Random(seed)
    starts = [rng.randrange(1, len(tokens) - num_prompt) for _ in range(count)]
    return [TracedRequest([tokens[0], *tokens[start : start + num_prompt - 1]], num_new) for start in starts]


def others_cpu_s(own: Iterable[int]) -> float:
    """Return the processor time of all processes but this one and those of some ids, since the machine started."""
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:])
    mine = 0
    for process_id in (os.getpid(), *own):
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        mine += int(fields[11]) + int(fields[12])
    return (user + nice + system + irq + softirq - mine) / tick


def measure(client: Client, requests: list[TracedRequest], own: Iterable[int]) -> dict[str, float]:
    """Send requests at once and return their figures, with the cores that other processes used meanwhile.

    Raises:
        RuntimeError: an answer failed, or has not all tokens.
    """
    before_s = others_cpu_s(own)
    load = asyncio.run(send_in_turn(client, requests, len(requests), asyncio.Event()))
    for outcome in load.outcomes:
        if outcome.kind != COMPLETED or outcome.num_new != requests[0].max_tokens:
            raise RuntimeError(f"{outcome.kind} {outcome.detail}: {outcome.num_new} tokens")
    num_new = sum(request.max_tokens for request in requests)
    firsts = percentiles([outcome.pieces_s[0] - outcome.sent_s for outcome in load.outcomes])
    return {
        "output_tokens_per_s": num_new / load.duration_s,
        "time_to_first_token_s": firsts["p50"],
        "cores_of_others": (others_cpu_s(own) - before_s) / load.duration_s,
    }


def qualities(path: Path | None) -> dict[str, Any]:
    """Return the figures of quality of both, by their names here."""
    if path is None:
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {name: rows[row]["divergence"] for name, row in ROWS.items() if row in rows}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("--llama-server", type=Path, required=True, help="the program")
    parser.add_argument("--quire-options", default="", help="more options of quire serve, in one argument")
    parser.add_argument("--quality", type=Path, help="a file of benchmarks.quality, such as results/quality.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens of an output")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="http_peers", help="name of the file under results/")
    args = parser.parse_args()
    options = EngineConfig.from_options(model=str(args.file)).model
    tokenizer = open_tokenizer(options, Checkpoint.open(options.model))
    assert tokenizer is not None
    texts = read_quality_text(tokenizer, None, SLOT_TOKENS, 0)
    tokens = [texts[0][0], *(token_id for ids in texts for token_id in ids[1:])]
    quality = qualities(args.quality)
    runs: dict[str, dict[int, list[dict[str, float]]]] = {}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(serving(command)) for name, command in commands(args).items()}
        own = [process_id for _, process_id in servers.values()]
        for round_idx in range(-1, args.rounds):  # the first round warms up
            for count in MARKS:
                for name, (client, _) in servers.items():
                    requests = requests_of(tokens, count, args.prompt, args.new, seed=2 * round_idx + count)
                    found = measure(client, requests, own)
                    if round_idx >= 0:
                        runs.setdefault(name, {}).setdefault(count, []).append(found)
                        print(f"round {round_idx}: {count:2} at once, {name:12} {found}", flush=True)
    table = {
        name: {
            str(count): {key: statistics.median(run[key] for run in found) for key in found[0]}
            for count, found in counts.items()
        }
        for name, counts in runs.items()
    }
    ratios = {}
    for count, mark in MARKS.items():
        ours, theirs = (table[name][str(count)]["output_tokens_per_s"] for name in ("quire", "llama-server"))
        ratios[str(count)] = ours / theirs
        print(f"{count:2} at once: {ours:.1f} and {theirs:.1f} tokens/s, {ours / theirs:.2f} times (mark: {mark})")
    shares = [run["cores_of_others"] for counts in runs.values() for found in counts.values() for run in found]
    print(f"cores that other processes used: {statistics.median(shares):.2f} on median, {max(shares):.2f} at most")
    for name, figures in quality.items():
        print(f"{name}: mean KL divergence {figures['kl_mean']:.5f}, same best token {figures['same_best']:.1%}")
    settings = {"file": args.file.name, "prompt": args.prompt, "new": args.new, "rounds": args.rounds}
    settings |= {"threads": args.threads, "quire_options": args.quire_options, "peer": version(args.llama_server)}
    saved = {"settings": settings, "medians": table, "ratios": ratios, "quality": quality, "runs": runs}
    print(machine.save(args.name, saved))


def version(program: Path) -> str | None:
    """Return the version that llama-server says."""
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"version: *(.+)", done.stdout + done.stderr)
    return found[1] if found else None


if __name__ == "__main__":
    main()
