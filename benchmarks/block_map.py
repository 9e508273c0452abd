"""The cost of a watcher of the block map: `python -m benchmarks.block_map`.

Streams run on the bundled model in process, in turns with and without a watcher of the live map that reads every event;
with `--tree`, the prefix tree is read once a second too, as the page does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from typing import Any

from benchmarks import machine
from quire.engine.async_llm import AsyncLLM
from quire.sequences.params import SamplingParams
from quire.server.kv_views.block_map import BlockMapHub
from quire.server.kv_views.prefix_tree import PrefixTreeView

SHARED = list(range(100, 260))
PARAMS = SamplingParams(max_tokens=400, ignore_eos=True, temperature=1.0)


async def run_streams(llm: AsyncLLM, num_streams: int) -> float:
    """Return the tokens per second of streams that begin alike."""

    async def stream(idx: int) -> None:
        async for _ in llm.generate({"prompt_token_ids": [*SHARED, 300 + idx]}, PARAMS):
            pass

    began_s = time.perf_counter()
    await asyncio.gather(*map(stream, range(num_streams)))
    assert PARAMS.max_tokens is not None
    return num_streams * PARAMS.max_tokens / (time.perf_counter() - began_s)


async def watched(llm: AsyncLLM, num_streams: int, *, has_tree: bool) -> tuple[float, float]:
    """Return the tokens per second of streams beside a watcher, and the events per second that it read."""
    hub, tree, num_events = BlockMapHub(llm, lambda: False), PrefixTreeView(llm), 0
    watcher = hub.watch(None)

    async def read() -> None:
        nonlocal num_events
        async for _ in watcher.events(60):
            num_events += 1

    async def read_tree() -> None:
        while has_tree:
            await tree.read(None)
            await asyncio.sleep(1)

    readers = [asyncio.create_task(read()), asyncio.create_task(read_tree())]
    began_s = time.perf_counter()
    rate = await run_streams(llm, num_streams)
    events_per_s = num_events / (time.perf_counter() - began_s)
    hub.leave(watcher)
    watcher.close()
    for reader in readers:
        reader.cancel()
    return rate, events_per_s


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of streams."""
    rows = []
    async with AsyncLLM.from_options("bundled", num_kv_blocks=options.blocks, num_threads=options.threads) as llm:
        await run_streams(llm, 8)
        for num_streams in options.streams:
            pairs = []
            for turn in range(options.turns):
                # Each goes first in every second turn.
                if turn % 2:
                    alone = await run_streams(llm, num_streams)
                beside, events = await watched(llm, num_streams, has_tree=options.tree)
                if not turn % 2:
                    alone = await run_streams(llm, num_streams)
                pairs.append((alone, beside, events))
            share = statistics.median(beside / alone for alone, beside, _ in pairs)
            rows.append({"streams": num_streams, "pairs": pairs, "share": share})
            alone, beside, events = (statistics.median(each) for each in zip(*pairs, strict=True))
            print(
                f"{num_streams:3} streams: {alone:.0f} tokens/s alone, {beside:.0f} watched "
                f"({share:.3f} of it, median of {options.turns} pairs), {events:.1f} events/s",
                flush=True,
            )
    return rows


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=65_536)
    parser.add_argument("--streams", type=int, nargs="+", default=[24, 128])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--tree", action="store_true", help="the prefix tree is read too")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    print(machine.save("block_map", {"threads": options.threads, "blocks": options.blocks, "rows": rows}))


if __name__ == "__main__":
    main()
