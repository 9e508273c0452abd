"""Long random runs: whatever the pool, the budget, the policy and the clients do, the tokens are the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.memory import ChunkedLocal, FullAttention, KVCacheSpec, MediaSpan, RecurrentState, SlidingWindow
from tests.scheduling.rig import NEVER, VOCAB_SIZE, Guesser, Job, Setting, run

FULL = (FullAttention(block_size=4),)
WINDOW = SlidingWindow(block_size=4, window=9)
STATE = RecurrentState(block_size=4, layer_bytes=FULL[0].bytes_per_block)
# In prompts that are long enough for them.
FOX, KITE = MediaSpan(1, 5, b"fox"), MediaSpan(1, 5, b"kite")

jobs = st.builds(
    Job,
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple),
    max_tokens=st.integers(1, 9),
    n=st.sampled_from([1, 1, 2, 3]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (3,)]),
    prompt_logprobs=st.sampled_from([None, None, 0]),
    cache_salt=st.sampled_from([None, None, "tenant"]),
    media=st.sampled_from([(), (), (FOX,), (KITE,), (FOX._replace(start=2),), (FOX, KITE._replace(start=6))]),
    priority=st.integers(-1, 1),
    arrives_at=st.integers(0, 12),
    abort_at=st.just(NEVER) | st.integers(0, 20),
    abort_while_running=st.booleans(),
)


def kinds_of(block_size: int) -> list[KVCacheSpec]:
    """Return cache groups of each kind, full attention the likeliest."""
    return [
        FullAttention(block_size=block_size),
        FullAttention(block_size=block_size),
        SlidingWindow(block_size=block_size, window=5),
        ChunkedLocal(block_size=block_size, chunk=6),
        RecurrentState(block_size=block_size, layer_bytes=FullAttention(block_size=block_size).bytes_per_block),
    ]


@st.composite
def narrow_settings(draw: st.DrawFn) -> Setting:
    """Settings in which everything is scarce, but every job (of at most 23 tokens, 3 samples) can end."""
    block_size = draw(st.integers(1, 5))
    max_num_seqs = draw(st.integers(3, 8))
    least = -(-23 // block_size)
    specs = draw(st.lists(st.sampled_from(kinds_of(block_size)), min_size=1, max_size=2).map(tuple))
    return Setting(
        specs=specs,
        num_blocks=draw(st.integers(least, 2 * least + 4)),
        block_size=block_size,
        budget=draw(st.integers(max_num_seqs, 24)),
        chunk_tokens=draw(st.none() | st.integers(1, 9)),
        max_num_seqs=max_num_seqs,
        watermark=draw(st.integers(0, 3)),
        caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        snapshot_interval=draw(st.sampled_from([None, block_size, 3 * block_size])),
        preemption_policy=draw(st.sampled_from(["last", "least_waste"])),
        preemption_mode=draw(st.sampled_from(["auto", "swap", "recompute"])),
        host_blocks=draw(st.sampled_from([0, 1, 3, least, 3 * least])),
        drafts=draw(st.sampled_from(["", "guesser", "model"])),
    )


def undisturbed(jobs: list[Job]) -> list[list[list[int]]]:
    """Return the tokens of each job when it has everything for itself and nobody is aborted."""
    free = [replace(job, abort_at=NEVER, arrives_at=0) for job in jobs]
    return run(free, Setting(caching=False), is_audited=False).outputs


def agrees(job: Job, samples: list[list[int]], expected: list[list[int]]) -> bool:
    """Tell whether samples are the expected ones, or, after an abort, beginnings of them."""
    if job.abort_at == NEVER:
        return samples == expected
    return all(tokens == whole[: len(tokens)] for tokens, whole in zip(samples, expected, strict=False))


@settings(max_examples=150)
@given(jobs=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings())
def test_tokens_do_not_depend_on_memory_budget_policy_or_company(jobs: list[Job], setting: Setting) -> None:
    outcome = run(jobs, setting)
    for job, samples, expected in zip(jobs, outcome.outputs, undisturbed(jobs), strict=True):
        assert agrees(job, samples, expected)


def random_jobs(rng: random.Random, count: int) -> list[Job]:
    """Return jobs that share prefixes, arrive in a trickle, and now and then go away."""
    shared = tuple(rng.randrange(VOCAB_SIZE - 1) for _ in range(30))
    return [
        Job(
            prompt=shared[: rng.randrange(1, 30)] + tuple(rng.randrange(12) for _ in range(rng.randrange(1, 12))),
            max_tokens=rng.randrange(1, 30),
            n=rng.choice((1, 1, 2, 4)),
            min_tokens=rng.choice((0, 0, 1)),
            prompt_logprobs=rng.choice((None, None, None, 0)),
            priority=rng.randrange(3),
            arrives_at=rng.randrange(60),
            abort_at=rng.choice((NEVER, NEVER, NEVER, rng.randrange(90))),
            abort_while_running=rng.random() < 0.5,
        )
        for _ in range(count)
    ]


def with_media(jobs: list[Job]) -> list[Job]:
    """Return the same token ids, of one medium or another, here or there."""
    choices = [(), (FOX,), (KITE,), (FOX._replace(start=6),), (FOX, KITE._replace(start=12, num_tokens=9))]
    return [replace(job, media=choices[i % 5]) for i, job in enumerate(jobs)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "setting",
    [
        Setting(num_blocks=19, budget=16, max_num_seqs=8, watermark=1),
        Setting(num_blocks=19, budget=16, max_num_seqs=8, watermark=1, caching=False),
        Setting(num_blocks=40, budget=8, max_num_seqs=8, watermark=2, policy="priority", chunk_tokens=3),
        Setting(num_blocks=75, block_size=1, budget=64, max_num_seqs=16),
        Setting(num_blocks=9, block_size=16, budget=7, max_num_seqs=6, watermark=1, policy="priority"),
        Setting(num_blocks=19, budget=16, max_num_seqs=8, watermark=1, specs=(*FULL, WINDOW)),
        Setting(num_blocks=19, budget=16, max_num_seqs=8, watermark=1, specs=(*FULL, WINDOW), retention=9),
        Setting(num_blocks=6, budget=32, max_num_seqs=8, specs=(WINDOW,)),
        Setting(num_blocks=9, budget=64, max_num_seqs=8, specs=(ChunkedLocal(block_size=4, chunk=10), WINDOW)),
        Setting(num_blocks=5, budget=64, max_num_seqs=8, specs=(STATE,), snapshot_interval=8),
        Setting(num_blocks=12, budget=16, max_num_seqs=8, watermark=1, specs=(*FULL, STATE), snapshot_interval=4),
        Setting(num_blocks=12, budget=64, max_num_seqs=8, specs=(STATE, WINDOW, *FULL)),
        Setting(num_blocks=19, budget=16, max_num_seqs=8, preemption_mode="swap", host_blocks=60),
        Setting(num_blocks=19, budget=16, max_num_seqs=8, preemption_policy="least_waste", host_blocks=12),
        Setting(
            num_blocks=19,
            budget=16,
            max_num_seqs=8,
            caching=False,
            policy="priority",
            preemption_mode="swap",
            preemption_policy="least_waste",
            host_blocks=30,
        ),
        Setting(
            num_blocks=19, budget=16, max_num_seqs=8, preemption_mode="swap", host_blocks=40, specs=(*FULL, WINDOW)
        ),
        Setting(num_blocks=6, budget=32, max_num_seqs=8, preemption_mode="swap", host_blocks=9, specs=(WINDOW,)),
    ],
    ids=[
        "tight",
        "tight, no caching",
        "priority",
        "blocks of one token",
        "tiny budget",
        "full and window",
        "hints",
        "a pool smaller than a chunk",
        "chunks and windows",
        "states",
        "full and states",
        "states, windows and full",
        "swap",
        "least waste, small host",
        "priority, least waste, swap, no caching",
        "full and window, swap",
        "a pool smaller than a chunk, swap",
    ],
)
@pytest.mark.parametrize("drafts", ["", "guesser", "model"])
def test_long_runs(seed: int, setting: Setting, drafts: str) -> None:
    jobs = random_jobs(random.Random(seed), 40)
    outcome = run(jobs, replace(setting, drafts=drafts))
    for job, samples, expected in zip(jobs, outcome.outputs, undisturbed(jobs), strict=True):
        assert agrees(job, samples, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("specs", [FULL, (*FULL, WINDOW), (*FULL, STATE)], ids=["full", "full and window", "states"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_long_runs_with_media(seed: int, specs: tuple[KVCacheSpec, ...], mode: str) -> None:
    jobs = with_media(random_jobs(random.Random(seed), 40))
    setting = Setting(
        num_blocks=19, budget=16, max_num_seqs=8, specs=specs, preemption_mode=mode, host_blocks=40 * (mode == "swap")
    )
    outcome = run(jobs, setting)
    for job, samples, expected in zip(jobs, outcome.outputs, undisturbed(jobs), strict=True):
        assert agrees(job, samples, expected)
    assert outcome.scheduler.stats.prefix_hits > 20


def test_long_runs_do_preempt_copy_hit_and_evict() -> None:
    """The runs above would prove little if nothing went on in them."""
    outcome = run(random_jobs(random.Random(0), 30), Setting(num_blocks=19, budget=16, max_num_seqs=8, watermark=1))
    stats, usage = outcome.scheduler.stats, outcome.scheduler.memory.usage()
    assert stats.num_preemptions > 10
    assert stats.prefix_hits > 50
    assert stats.resumed_hits > 50
    assert min(usage.num_copies, usage.num_evictions, usage.num_merges) > 3
    assert outcome.peak_blocks == 19


def test_long_runs_do_swap_families_out_and_in() -> None:
    setting = Setting(num_blocks=19, budget=16, max_num_seqs=8, preemption_mode="swap", host_blocks=60)
    outcome = run(random_jobs(random.Random(0), 30), setting)
    stats, host = outcome.scheduler.stats, outcome.scheduler.memory.usage().host
    assert host is not None
    assert stats.num_swaps > 5
    assert stats.num_preemptions > stats.num_swaps, "some families are torn, and recompute"
    assert min(host.num_swap_outs, host.num_swap_ins) > 5


@pytest.mark.parametrize("drafts", ["guesser", "model"])
def test_long_runs_do_accept_and_reject_drafts(drafts: str) -> None:
    setting = Setting(num_blocks=40, budget=16, max_num_seqs=8, drafts=drafts)
    outcome = run(random_jobs(random.Random(0), 30), setting)
    drafter = outcome.scheduler.drafter
    assert isinstance(drafter, Guesser)
    num_drafted, num_accepted = drafter.counts
    assert 100 < num_accepted < 0.9 * num_drafted
    stats = outcome.scheduler.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (num_drafted, num_accepted)
    assert sum(stats.accepted_by_position) == num_accepted
    assert stats.accepted_by_position == sorted(stats.accepted_by_position, reverse=True)
    # The passer-by at the end is a sequence too.
    assert drafter.num_forgotten == 1 + sum(len(request.sequences) for request in outcome.requests)
