"""The cost of KV events: `python -m benchmarks.kv_events`.

Scheduler and memory are the real ones; the data plane draws a fixed token. Sequences decode, a block of each fills
every 16 steps, and prompts come and go, so that blocks are published and evicted. The same steps run without events and
with a publisher that sends them over ZMQ, in turns; the difference is the cost on the engine's thread, with what the
publisher's thread takes of the interpreter meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks import machine
from quire.config import KVEventsConfig
from quire.kvevents.publisher import KVEventPublisher
from quire.memory.kv_events import KVEventCollector
from quire.memory.manager import KVCacheManager
from quire.memory.specs import FullAttention
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request
from quire.simulation.executor import CountingExecutor

PROMPT, OUTPUT, BLOCK_SIZE = 512, 128, 16


def run(num_seqs: int, num_steps: int, *, has_events: bool) -> tuple[float, int]:
    """Return the mean seconds of a step of the control plane, and the number of batches."""
    memory = KVCacheManager([FullAttention(block_size=BLOCK_SIZE)], num_seqs * (PROMPT + OUTPUT) // BLOCK_SIZE * 2)
    scheduler = Scheduler(memory, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs + 2048)
    executor = CountingExecutor()
    collector = KVEventCollector(memory) if has_events else None
    publisher = None
    if collector is not None:
        publisher = KVEventPublisher(KVEventsConfig(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*"))
    num_requests = 0
    spent_s = 0.0
    for _ in range(num_steps):
        while len(scheduler.requests) < num_seqs:
            params = SamplingParams(max_tokens=OUTPUT - num_requests % 64, ignore_eos=True, detokenize=False)
            tokens = [(num_requests * 7919 + idx) % 30_000 for idx in range(PROMPT)]
            limit = PROMPT + params.max_tokens if params.max_tokens else PROMPT
            scheduler.add(Request(str(num_requests), tokens, params, limit, frozenset(), num_requests, seed=0))
            num_requests += 1
        begin_s = time.perf_counter()
        plan = scheduler.plan(0)
        scheduler.update_from_results(plan.items, executor.execute(plan).items)
        if collector is not None and publisher is not None and collector.has_events:
            publisher.publish(collector.take_events())
        spent_s += time.perf_counter() - begin_s
    num_batches = 0
    if publisher is not None:
        num_batches = publisher.next_seq
        publisher.close()
    return spent_s / num_steps, num_batches


def main() -> None:
    """Measure in turns, print a table and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = []
    print(f"{'sequences':>10}{'without':>12}{'with events':>14}{'cost a step':>14}{'batches':>10}")
    for num_seqs in (1, 16, 64, 256):
        turns = [
            (run(num_seqs, options.steps, has_events=False)[0], *run(num_seqs, options.steps, has_events=True))
            for _ in range(options.rounds)
        ]
        without, with_events = (statistics.median(turn[idx] for turn in turns) for idx in (0, 1))
        print(
            f"{num_seqs:>10}{1e6 * without:>9.0f} us{1e6 * with_events:>11.0f} us"
            f"{1e6 * (with_events - without):>11.0f} us{turns[0][2]:>10}"
        )
        rows.append({"num_seqs": num_seqs, "without_s": without, "with_s": with_events})
    print(machine.save("kv_events", {"rows": rows}))


if __name__ == "__main__":
    main()
