"""The interface of the compared engines: requests that arrive at once, and the arrival time of each token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quire.measurement.bench.workloads import BenchRequest

Figures = dict[str, Any]
BLOCK_SIZE, NUM_BLOCKS = 16, 1280  # 20,480 tokens of KV for everyone who lets it be set
NUM_KV_TOKENS = BLOCK_SIZE * NUM_BLOCKS
MAX_MODEL_LEN = 4608  # at least; W6 asks for more


class Setup(NamedTuple):
    """The setup of an engine.

    Args:
        model: the checkpoint, in the form that this engine reads.
        num_threads: number of threads.
        num_seqs: maximum number of sequences that run at once.
        max_model_len: longest sequence, in tokens.
        caching: whether prompts may share what is computed for their prefix.
        options: options of this engine; see `contenders.CONTENDERS`.
    """

    model: Path
    num_threads: int
    num_seqs: int
    max_model_len: int
    caching: bool
    options: dict[str, Any]


class BenchmarkEngine(Protocol):
    """Serves token ids."""

    def serve(self, requests: list[BenchRequest]) -> Figures:
        """Serve requests that arrive at once, greedily and past the end-of-sequence token; see `figures_of`."""


class Steps(Protocol):
    """An engine whose steps are run by hand."""

    def add(self, requests: list[BenchRequest]) -> None:
        """Queue requests; none is in progress."""

    def step(self) -> list[tuple[int, int]]:
        """Run one step and return (index of the request, number of its new tokens) for those that have some."""


def serve_by_steps(engine: Steps, requests: list[BenchRequest]) -> Figures:
    """Serve requests that arrive at once."""
    times: list[list[float]] = [[] for _ in requests]
    num_left = sum(request.num_new for request in requests)
    started_s = time.perf_counter()
    engine.add(requests)
    while num_left > 0:
        for idx, num_new in engine.step():
            times[idx] += [time.perf_counter()] * num_new
            num_left -= num_new
    return figures_of(requests, started_s, times)


def figures_of(requests: list[BenchRequest], started_s: float, times: list[list[float]]) -> Figures:
    """Return what a run comes to.

    Args:
        requests: requests that were served.
        started_s: when.
        times: when each token of each request came, by the same clock.

    Returns:
        `wall_s`, to the last token; `all_started_s`, to the last of the first tokens, when all prompts are computed;
        `tokens_per_s`; and `decode_tokens_per_s`, of the tokens after that moment, None where there are none.

    Raises:
        RuntimeError: a request has not got the tokens that were asked for.
    """
    wanted, counts = [request.num_new for request in requests], [len(row) for row in times]
    if counts != wanted:
        raise RuntimeError(f"asked for {wanted} new tokens, got {counts}")
    last_first, last = max(row[0] for row in times), max(row[-1] for row in times)
    num_later = sum(moment > last_first for row in times for moment in row)
    return {
        "wall_s": last - started_s,
        "all_started_s": last_first - started_s,
        "tokens_per_s": sum(counts) / (last - started_s),
        "decode_tokens_per_s": num_later / (last - last_first) if num_later else None,
    }
