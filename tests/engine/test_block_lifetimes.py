"""Lifetimes of blocks, by a clock that the test sets, and the metrics of memory."""

from __future__ import annotations

import pytest

from quire.engine.exporters.kv_collector import KvMetrics
from quire.engine.exporters.prometheus import Metrics
from quire.engine.metrics.block_lifetimes import BOUNDS_S, MIN_SAMPLED, BlockLifetimes, TimeHistogram
from quire.memory import FullAttention, KVCacheManager, Namespace, SlidingWindow
from tests.engine.test_llm import greedy, load
from tests.engine.test_metrics import Clock, samples


def live(manager: KVCacheManager, seq_id: int, tokens: list[int]) -> None:
    """Compute a prompt and leave."""
    chain = manager.chain(tokens, Namespace())
    manager.allocate(seq_id, chain, manager.match_prefix(chain))
    assert manager.append_slots((seq_id,), len(tokens) - manager.sequences[seq_id].num_slots)
    manager.publish(seq_id, len(tokens))
    manager.free(seq_id)


def watched(num_blocks: int, share: float = 1.0) -> tuple[KVCacheManager, BlockLifetimes, Clock]:
    manager = KVCacheManager([FullAttention(block_size=2)], num_blocks)
    clock = Clock()
    return manager, BlockLifetimes([group.pool for group in manager.groups], share, lambda: clock.now_s), clock


def test_lives_gaps_and_ends_are_timed() -> None:
    manager, residency, clock = watched(2)
    live(manager, 1, [0, 0, 0, 0])
    clock.now_s = 3.0
    live(manager, 2, [0, 0, 0])  # hits the first block, and takes the second, idle for 3 s
    assert (residency.reuse_gap.sum_s, sum(residency.reuse_gap.counts)) == (3.0, 1)
    assert (residency.idle.sum_s, sum(residency.idle.counts)) == (3.0, 1)
    clock.now_s = 10.0
    live(manager, 3, [1, 1, 1, 1])
    # Both blocks came to rest at 3 s; the first was taken at 0 s, the second, which the tail is in, at 3 s.
    assert (residency.idle.sum_s, residency.lifetime.sum_s) == (3.0 + 7.0 + 7.0, 3.0 + 10.0 + 7.0)
    assert sum(residency.lifetime.counts) == 3


def test_a_reset_is_no_eviction_and_a_move_no_life() -> None:
    manager, residency, clock = watched(3)
    live(manager, 1, [0, 0])
    manager.reset_prefix_cache()
    clock.now_s = 5.0
    live(manager, 2, [1] * 6)
    assert sum(residency.idle.counts) == 0
    observer = manager.groups[0].pool.observer
    assert observer is not None
    observer.on_move(1, 2)
    clock.now_s = 6.0
    live(manager, 3, [0] * 6)
    assert (sum(residency.idle.counts), sum(residency.lifetime.counts)) == (3, 1)


@pytest.mark.parametrize(
    ("num_blocks", "share", "num_sampled"),
    [(5, 0.01, 5), (160, 0.01, MIN_SAMPLED), (10_000, 0.01, 100), (10_000, 1.0, 10_000), (999, 0.5, 500)],
)
def test_the_sample_is_a_share_and_never_none(num_blocks: int, share: float, num_sampled: int) -> None:
    assert watched(num_blocks, share)[1].num_sampled == num_sampled


def test_groups_are_watched_together() -> None:
    manager = KVCacheManager([FullAttention(block_size=2), SlidingWindow(block_size=2, window=3)], 4)
    residency = BlockLifetimes([group.pool for group in manager.groups], 1.0, lambda: 0.0)
    for seq_id in range(12):
        live(manager, seq_id, [seq_id] * 6)
    assert sum(residency.lifetime.counts) == sum(residency.idle.counts) == manager.usage().num_evictions > 0


def test_a_summary_bounds_its_shares() -> None:
    spans = TimeHistogram()
    assert spans.summary() == (0, 0.0, 0.0, 0.0)
    for seconds in (0.0005, 0.3, 0.3, 0.4, 500_000.0):
        spans.add(seconds)
    summary = spans.summary()
    assert (summary.num_times, summary.p50_s, summary.p90_s) == (5, 0.5, 500_000.0)
    assert spans.counts[0] == spans.counts[-1] == 1
    assert len(spans.counts) == len(BOUNDS_S) + 1


def test_metrics_show_the_memory_as_it_is() -> None:
    llm = load(num_kv_blocks=64, kv_cache_metrics_sample=1.0, pin_limit=0.125)
    metrics = Metrics("tiny")
    metrics.set_engine(llm.engine)
    llm.pin_prefix("a client's name", list(range(10, 42)))
    for start in range(4):
        llm.generate([[50 + start] * 300, [80 + start] * 300], greedy(2, ignore_eos=True), use_tqdm=False)
    values = samples(metrics)
    usage = llm.usage()
    for state in ("used", "idle", "free"):
        assert values[f"vllm:kv_blocks{{group=0,state={state},tier=device}}"] == getattr(usage, state)
    assert values["vllm:kv_block_evictions_total"] == usage.num_evictions > 0
    assert values["vllm:kv_block_copies_total"] == usage.num_copies
    assert values["vllm:kv_block_merges_total"] == usage.num_merges
    assert (values["vllm:kv_pinned_blocks"], values["vllm:kv_retained_bytes"]) == (2, 0)
    assert values["vllm:kv_block_lifetime_seconds_count"] == usage.num_evictions
    assert values["vllm:kv_block_idle_before_evict_seconds_bucket{le=+Inf}"] == usage.num_evictions
    assert values["vllm:kv_block_lifetime_seconds_sum"] >= values["vllm:kv_block_idle_before_evict_seconds_sum"] > 0
    assert values["vllm:kv_block_reuse_gap_seconds_count"] >= 0
    assert "client" not in metrics.render().decode()
    llm.close()


def test_what_is_not_measured_is_not_shown() -> None:
    llm = load(kv_cache_metrics_sample=0)
    assert llm.engine.block_lifetimes is None
    assert all(group.pool.observer is None for group in llm.engine.scheduler.memory.groups)
    names = {family.name for family in KvMetrics(llm.engine, "tiny", "vllm").collect()}
    assert "vllm:kv_blocks" in names
    assert not any("seconds" in name for name in names)
    llm.close()
