"""The cost of HTTP: `python -m benchmarks.http_load`.

For each number of streams, in turns: the engine of `quire bench` in a process of its own, then the same requests at
once over HTTP, as streams of `/v1/completions` from this process to `quire serve`. Then 1,000 clients at once, to a
server whose queue is short, and one request after them. The processor times do not depend on what else the machine
does, or little: of the server's main thread, which speaks HTTP, of the engine's with all others, and of this process.
`--whole` asks for answers in one piece, in place of streams.

Rounds end when `--time-limit` is near, and the file is written after each, so that a busy machine costs rounds and not
the run. On a quiet machine the limit of 330 s leaves time for the last round and the crowd within 8 minutes. `--short`
is one round of short outputs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from benchmarks import machine
from benchmarks.http_load_server import MAX_NUM_SEQS, InProcess, Server, in_process, served, workload
from quire.measurement.bench.percentiles import percentiles

MARKS = {"of_in_process": 0.95, "p99_of_median": 3.0, "slowest_of_fastest": 1.5}
QUEUE_LEN = 256
RECOVERED_S = 1.0
# A load that takes so long has hung; a machine that is merely busy needs less.
TIMEOUT_S = 300.0
SHORT_OUTPUT_LEN = 64


def over_http(server: Server, num_streams: int, output_len: int, seed: int) -> dict[str, Any]:
    """Return the figures of one load of streams.

    Raises:
        RuntimeError: an answer was not whole.
        TimeoutError: the answers did not end in time.
    """
    before = server.cpu_s()
    answers = server.send_all(workload(num_streams, output_len, seed), TIMEOUT_S)
    used_s = {name: after - before[name] for name, after in server.cpu_s().items()}
    num_new = sum(answer.num_new for answer in answers)
    if num_new != num_streams * output_len:
        statuses = Counter(answer.status for answer in answers)
        raise RuntimeError(f"wanted {num_streams * output_len} new tokens, got {num_new}; statuses {statuses}")
    begun_s = min(answer.sent_s for answer in answers)
    times = [answer.ended_s - answer.sent_s for answer in answers]
    figures = {
        "output_tokens_per_s": num_new / (max(answer.ended_s for answer in answers) - begun_s),
        "slowest_of_fastest": max(times) / min(times),
        **{f"{name}_us_per_token": 1e6 * seconds / num_new for name, seconds in used_s.items()},
    }
    if not server.streams:
        return figures
    gaps = percentiles([later - earlier for answer in answers for earlier, later in pairwise(answer.pieces_s)])
    num_pieces = sum(len(answer.pieces_s) for answer in answers)
    return {
        **figures,
        "inter_token_latency_s": gaps,
        "p99_of_median": gaps["p99"] / gaps["p50"],
        "num_pieces": num_pieces,
        "tokens_per_piece": num_new / num_pieces,
    }


def crowd(num_clients: int) -> dict[str, Any]:
    """Return what became of many clients at once, and how long one request took afterwards."""
    with served("--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue-len", str(QUEUE_LEN)) as server:
        server.send_all(workload(1, 8, seed=0), TIMEOUT_S)
        answers = server.send_all(workload(num_clients, 32, seed=1), TIMEOUT_S)
        (after,) = server.send_all(workload(1, 8, seed=0), TIMEOUT_S)
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


class Rounds:
    """The rounds of all loads, in which both sides take turns.

    Args:
        options: options of the command line.
        alone: the engine without HTTP.
        server: the server.

    Attributes:
        failures: loads without figures, each with its error.
        skipped: rounds for which there was no time.
    """

    def __init__(self, options: argparse.Namespace, alone: InProcess, server: Server) -> None:
        self._options = options
        self._alone = alone
        self._server = server
        self._runs: dict[int, list[dict[str, Any]]] = {}
        self.memory_mib = 0.0
        self.failures: list[str] = []
        self.skipped: list[str] = []

    def run(self, begun_s: float) -> None:
        """Run rounds until there are enough, or the time is over; each load has one round at least."""
        self._server.streams = not self._options.whole
        self._server.send_all(workload(8, 8, seed=999), TIMEOUT_S)  # connections, buffers and code are warm
        self.memory_mib = self._server.memory_mib()
        longest_s = dict.fromkeys(self._options.streams, 0.0)
        for idx in range(self._options.runs):
            for num_streams in self._options.streams:
                round_s = time.monotonic()
                if idx and round_s + longest_s[num_streams] > begun_s + self._options.time_limit:
                    self.skipped.append(f"no time for round {idx + 1} of {num_streams} streams")
                    continue
                self._round(idx, num_streams)
                longest_s[num_streams] = max(longest_s[num_streams], time.monotonic() - round_s)
            save(self._options, self)

    def summaries(self) -> list[dict[str, Any]]:
        """Return the figures of each load: medians, and which marks are met."""
        return [
            {
                "streams": num_streams,
                "output_len": self._options.output_len,
                "medians": (middle := _medians(runs)),
                "is_met": {name: _is_met(name, middle[name]) for name in MARKS if name in middle},
                "memory_mib": self.memory_mib,
                "runs": runs,
            }
            for num_streams, runs in sorted(self._runs.items())
        ]

    def _round(self, idx: int, num_streams: int) -> None:
        # No two loads have prompts in common, which the prefix cache would know.
        seed, output_len = 1000 * num_streams + idx, self._options.output_len
        alone = self._alone.measure(num_streams, output_len, seed, TIMEOUT_S)
        gaps = alone["inter_token_latency_s"]
        try:
            run = over_http(self._server, num_streams, output_len, seed)
        except (RuntimeError, TimeoutError, OSError) as error:
            self.failures.append(f"{num_streams} streams, round {idx + 1}: {error!r}")
            print(self.failures[-1], flush=True)
            return
        run["in_process_tokens_per_s"] = alone["output_tokens_per_s"]
        run["of_in_process"] = run["output_tokens_per_s"] / alone["output_tokens_per_s"]
        run["in_process_p99_of_median"] = gaps["p99"] / gaps["p50"]
        run["in_process_us_per_token"] = alone["us_per_token"]
        shown = {name: round(value, 2) for name, value in run.items() if isinstance(value, float)}
        print(num_streams, "streams:", shown, flush=True)
        self._runs.setdefault(num_streams, []).append(run)


def save(options: argparse.Namespace, rounds: Rounds, crowds: Sequence[dict[str, Any]] = ()) -> None:
    """Write what there is so far."""
    figures = {"marks": MARKS, "loads": rounds.summaries(), "crowds": list(crowds)}
    notes = {"failures": rounds.failures, "skipped": rounds.skipped}
    print(machine.save(options.name, {**figures, **notes}), flush=True)


def _medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    names = [name for name, value in runs[0].items() if isinstance(value, float)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def _is_met(name: str, value: float) -> bool:
    mark = MARKS[name]
    return value >= mark if mark < 1 else value <= mark


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--output-len", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3, help="rounds of each load")
    parser.add_argument("--short", action="store_true", help=f"one round of {SHORT_OUTPUT_LEN} new tokens a stream")
    parser.add_argument("--time-limit", type=float, default=330.0, help="seconds after which no further round begins")
    parser.add_argument("--whole", action="store_true", help="answers in one piece, in place of streams")
    parser.add_argument("--clients", type=int, default=1000, help="0 leaves the crowd out")
    parser.add_argument("--name", default="http_load", help="name of the file of results")
    options = parser.parse_args()
    if options.short:
        options.runs, options.output_len = 1, SHORT_OUTPUT_LEN
    return options


def main() -> int:
    """Measure, print and save; return 1 where something failed."""
    begun_s, options = time.monotonic(), read_options()
    flags = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-queue-len", "1024")
    with ExitStack() as stack:
        alone = stack.enter_context(in_process())
        rounds = Rounds(options, alone, stack.enter_context(served(*flags)))
        rounds.run(begun_s)
    crowds = []
    if options.clients:
        try:
            crowds.append(crowd(options.clients))
            print(f"crowd: {crowds[-1]}", flush=True)
        except (RuntimeError, TimeoutError, OSError) as error:
            rounds.failures.append(f"crowd: {error!r}")
    save(options, rounds, crowds)
    for load in rounds.summaries():
        middle = {name: round(load["medians"][name], 3) for name in load["is_met"]}
        print(f"{load['streams']} streams: {middle}, met: {load['is_met']}, memory: {load['memory_mib']:.0f} MiB")
    print("\n".join((*rounds.failures, *rounds.skipped, f"{time.monotonic() - begun_s:.0f} s")))
    return 1 if rounds.failures else 0


if __name__ == "__main__":
    sys.exit(main())
