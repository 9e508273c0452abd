"""Prefix hits of conversations in turn while memory is short: `python -m benchmarks.conversations`.

Four conversations of 4,096 tokens go on in turn, a turn at a time, so that each comes back when the other three have
used the memory. The pool is a multiple of the *live* bytes: the conversation that runs, while its prompt is computed in
the engine's steps, beside what the next turns of the other three read. With less, something that is read must go.
Scheduler and memory are the real ones with an engine's default options; the data plane draws a fixed token and moves
nothing. The share of prompt tokens hit counts every turn but a conversation's first, which nothing could hit.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks import machine
from quire.measurement.simulation.replicas.executor import CountingExecutor
from quire.memory.capacity.sizing import ArenaSizing
from quire.memory.manager import KVCacheManager
from quire.memory.results import Tier
from quire.memory.specs import FullAttention, KVCacheSpec, RecurrentState, SlidingWindow
from quire.scheduling.scheduler import Scheduler
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Request

NUM_CHATS, NUM_TURNS = 4, 7
FIRST_PROMPT, USER_TOKENS, OUTPUT_TOKENS = 4096, 32, 16
VOCAB, BUDGET, MAX_NUM_SEQS, WATERMARK, RETENTION = 32_000, 512, 256, 0.01, 0.25
FACTORS = (0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0)

# Cache groups of published models, 16 tokens a block and 16-bit values.
MODELS: dict[str, tuple[KVCacheSpec, ...]] = {
    "one group": (FullAttention(block_size=16, num_layers=28, num_kv_heads=8, head_dim=128),),
    "two equal groups": (FullAttention(block_size=16, num_layers=28, num_kv_heads=8, head_dim=128),) * 2,
    "Gemma 3 1B": (
        SlidingWindow(window=512, block_size=16, num_layers=22, num_kv_heads=1, head_dim=256),
        FullAttention(block_size=16, num_layers=4, num_kv_heads=1, head_dim=256),
    ),
    "Granite 4 hybrid 350M": (
        FullAttention(block_size=16, num_layers=4, num_kv_heads=4, head_dim=64),
        RecurrentState(block_size=16, num_layers=28, layer_bytes=797_184),
    ),
}


class HitFigures(NamedTuple):
    """The result of one run.

    Args:
        hit_share: prompt tokens that were hit, as a share of those of all turns but the first ones.
        num_evictions: blocks evicted from the device.
        moved_bytes: bytes copied between the tiers.
    """

    hit_share: float
    num_evictions: int
    moved_bytes: int


def pool_bytes(specs: Sequence[KVCacheSpec], factor: float) -> int:
    """Return the bytes of a pool that is `factor` times what the live blocks of all conversations take at their end."""
    num_tokens = FIRST_PROMPT + (NUM_TURNS - 1) * (USER_TOKENS + OUTPUT_TOKENS)
    layout = ArenaSizing.of(specs, 1 << 40).layout
    waiting = [spec.peak_blocks(num_tokens, 1) for spec in specs]
    # The running sequence holds more of a window in a prompt's steps, and a state besides the snapshot that it leaves.
    running = [2 if spec.is_recurrent else spec.peak_blocks(num_tokens, BUDGET) for spec in specs]
    num_live = layout.num_filled([(NUM_CHATS - 1) * rest + peak for rest, peak in zip(waiting, running, strict=True)])
    return layout._replace(num_slabs=round(factor * num_live)).num_bytes


def run(specs: Sequence[KVCacheSpec], factor: float, *, with_host: bool = False) -> HitFigures:
    """Serve all turns of all conversations.

    Args:
        specs: the cache groups.
        factor: bytes of the pool in units of the live bytes.
        with_host: give half of them to the device, and as many as all to a host tier.
    """
    num_bytes = pool_bytes(specs, factor)
    device_bytes = num_bytes // 2 if with_host else num_bytes
    num_slabs = ArenaSizing.of(specs, device_bytes).layout.num_slabs
    memory = KVCacheManager(
        specs,
        num_bytes=device_bytes,
        watermark=int(WATERMARK * num_slabs),
        retention_limit=int(RETENTION * num_slabs),
        host_bytes=num_bytes if with_host else 0,
        key=b"benchmark",
    )
    scheduler = Scheduler(memory, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=BUDGET)
    executor = CountingExecutor()
    chats = [[(chat * 7919 + idx) % VOCAB for idx in range(FIRST_PROMPT)] for chat in range(NUM_CHATS)]
    num_hit = num_prompt = moved_bytes = num_requests = 0
    for turn in range(NUM_TURNS):
        for number, tokens in enumerate(chats):
            if turn:
                tokens += [(number * 104_729 + turn * 1_299 + idx) % VOCAB for idx in range(USER_TOKENS)]
            params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
            prompt = tokens.copy()
            request = Request(
                str(num_requests), prompt, params, len(prompt) + OUTPUT_TOKENS, frozenset(), num_requests, seed=0
            )
            scheduler.add(request)
            num_requests += 1
            while scheduler.has_unfinished:
                plan = scheduler.plan(0)
                moved_bytes += sum(
                    specs[copy.group_idx].bytes_per_block
                    for copy in plan.ops.copies
                    if {copy.src_tier, copy.dst_tier} == {Tier.DEVICE, Tier.HOST}
                )
                scheduler.update_from_results(plan.items, executor.execute(plan).items)
            tokens += [executor.token_id] * OUTPUT_TOKENS
            if turn:
                assert request.account is not None
                num_hit += len(prompt) - request.account.sources.computed
                num_prompt += len(prompt)
    return HitFigures(num_hit / num_prompt, memory.usage().num_evictions, moved_bytes)


def main() -> None:
    """Measure all cases, print tables and save the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="conversations", help="the name of the file under results/")
    options = parser.parse_args()
    rows = []
    print(f"{'':32}" + "".join(f"{factor:>8}" for factor in FACTORS))
    for name, specs in MODELS.items():
        for with_host in (False, True):
            figures = [run(specs, factor, with_host=with_host) for factor in FACTORS]
            title = name + (", host" if with_host else "")
            print(f"{title:32}" + "".join(f"{each.hit_share:>8.3f}" for each in figures))
            if with_host:
                print(f"{'  MB between the tiers':32}" + "".join(f"{each.moved_bytes / 1e6:>8.0f}" for each in figures))
            rows.append({"model": name, "with_host": with_host, "runs": [each._asdict() for each in figures]})
    print(machine.save(options.name, {"factors": FACTORS, "rows": rows}))


if __name__ == "__main__":
    main()
