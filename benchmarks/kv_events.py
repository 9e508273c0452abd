"""The cost of KV events: `python -m benchmarks.kv_events`.

Scheduler and memory are the real ones; the data plane draws a fixed token. Sequences decode, a block of each fills
every 16 steps, and prompts come and go, so that blocks are published and evicted. The same steps run without events and
with a publisher that sends them over ZMQ, in turns.

Three figures of processor time, each the mean of all steps: a step without events; what events take on the engine's
thread, in the calls of the collector and the publisher; and all other threads. Every round has the same steps, so that
of each step the least of all rounds counts: other work on the machine only adds to it. What events take from the
scheduler's caches is not counted.

Predicted for 256 sequences, before digests were taken a prompt at a time: 0.2 ms on the engine's thread, and 0.15 ms
on others (`docs/lab/kv-events.md`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks import machine
from quire.config import KVEventsConfig
from quire.distributed.kv_events.publisher import KVEventPublisher
from quire.measurement.bench.stopwatch import Stopwatch, all_timed
from quire.measurement.simulation.replicas.executor import CountingExecutor
from quire.memory.kv_events import KVEventCollector
from quire.memory.manager import KVCacheManager
from quire.memory.specs import FullAttention
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request

PROMPT, OUTPUT, BLOCK_SIZE = 512, 128, 16
ENDPOINT = "tcp://127.0.0.1:*"
# Phase of the stopwatch.
EVENTS = "events"


class EventCosts(NamedTuple):
    """Times of a run of some steps.

    Args:
        steps_s: processor seconds of each step on the engine's thread, its events included.
        events_s: processor seconds of each step's events on the engine's thread.
        others_s: processor seconds of a step on other threads, the mean of all steps.
        num_batches: number of batches that were published.
    """

    steps_s: list[float]
    events_s: list[float]
    others_s: float
    num_batches: int


def run(num_seqs: int, num_steps: int, *, has_events: bool) -> EventCosts:
    """Run the control plane, with or without events."""
    memory = KVCacheManager([FullAttention(block_size=BLOCK_SIZE)], num_seqs * (PROMPT + OUTPUT) // BLOCK_SIZE * 2)
    scheduler = Scheduler(memory, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs + 2048)
    executor = CountingExecutor()
    publisher, watch = None, Stopwatch(time.thread_time)
    if has_events:
        collector = KVEventCollector(memory)
        publisher = KVEventPublisher(KVEventsConfig(endpoint=ENDPOINT, replay_endpoint=ENDPOINT))
        for index in (group.pool.index for group in memory.groups):
            assert index.observer is not None
            index.observer = all_timed(watch.timed, EVENTS, index.observer, "on_publish", "on_withdraw", "on_clear")
        publish, take_events = watch.timed(EVENTS, publisher.publish), watch.timed(EVENTS, collector.take_events)
    num_requests = 0
    steps_s, events_s = [], []
    own_s, all_s = time.thread_time(), time.process_time()
    for _ in range(num_steps):
        while len(scheduler.requests) < num_seqs:
            params = SamplingParams(max_tokens=OUTPUT - num_requests % 64, ignore_eos=True, detokenize=False)
            tokens = [(num_requests * 7919 + idx) % 30_000 for idx in range(PROMPT)]
            limit = PROMPT + params.max_tokens if params.max_tokens else PROMPT
            scheduler.add(Request(str(num_requests), tokens, params, limit, frozenset(), num_requests, seed=0))
            num_requests += 1
        watch.seconds.clear()
        begin_s = time.thread_time()
        plan = scheduler.plan(0)
        scheduler.update_from_results(plan.items, executor.execute(plan).items)
        if publisher is not None and collector.has_events:
            publish(take_events())
        steps_s.append(time.thread_time() - begin_s)
        events_s.append(watch.seconds.get(EVENTS, 0.0))
    num_batches = 0
    if publisher is not None:
        num_batches = publisher.next_seq
        publisher.close()
    others_s = (time.process_time() - all_s - (time.thread_time() - own_s)) / num_steps
    return EventCosts(steps_s, events_s, others_s, num_batches)


def least(steps: Iterable[list[float]]) -> float:
    """Return the mean of all steps, of each of which the least of all rounds counts."""
    return statistics.fmean(map(min, zip(*steps, strict=True)))


def main() -> None:
    """Measure in turns, print a table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64, 256])
    options = parser.parse_args()
    rows = []
    print(f"{'sequences':>10}{'step without':>14}{'events, here':>14}{'other threads':>15}{'batches':>10}")
    for num_seqs in options.sequences:
        without: list[EventCosts] = []
        with_events: list[EventCosts] = []
        for _ in range(options.rounds):
            without.append(run(num_seqs, options.steps, has_events=False))
            with_events.append(run(num_seqs, options.steps, has_events=True))
        row = {
            "num_seqs": num_seqs,
            "step_s": least(each.steps_s for each in without),
            "events_s": least(each.events_s for each in with_events),
            "other_threads_s": min(each.others_s for each in with_events),
        }
        print(
            f"{num_seqs:>10}{1e6 * row['step_s']:>11.0f} us{1e6 * row['events_s']:>11.0f} us"
            f"{1e6 * row['other_threads_s']:>12.0f} us{with_events[0].num_batches:>10}"
        )
        rows.append(row)
    print(machine.save("kv_events", {"rows": rows}))


if __name__ == "__main__":
    main()
