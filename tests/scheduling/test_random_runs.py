"""Long random runs: the tokens do not depend on pool, budget, policy or other clients."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.memory import ChunkedLocal, KVCacheSpec
from tests.decoding.beam_twin import Rules
from tests.decoding.beam_twin import search as search_slowly
from tests.scheduling.harness import END_TOKEN, NEVER, VOCAB_SIZE, Guesser, Harness, Job, Setting, outputs_of, run
from tests.scheduling.random_jobs import (
    FULL,
    STATE,
    WINDOW,
    agrees,
    crowd,
    jobs,
    narrow_settings,
    random_jobs,
    searches,
    undisturbed,
    with_beams,
    with_media,
)
from tests.scheduling.simulated_executor import log_probabilities


@settings(max_examples=100)
@given(jobs=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings())
def test_tokens_do_not_depend_on_memory_budget_policy_or_company(jobs: list[Job], setting: Setting) -> None:
    outcome = run(jobs, setting)
    for job, samples, expected in zip(jobs, outcome.outputs, undisturbed(jobs), strict=True):
        assert agrees(job, samples, expected)


@settings(max_examples=100)
@given(jobs=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings())
def test_tokens_do_not_depend_on_when_features_of_media_come(jobs: list[Job], setting: Setting) -> None:
    outcome = run(jobs, replace(setting, late_media=True))
    for job, samples, expected in zip(jobs, outcome.outputs, undisturbed(jobs), strict=True):
        assert agrees(job, samples, expected)


def test_beams_that_are_swapped_in_may_wait_for_tokens_of_a_later_step() -> None:
    """A run that hypothesis found: two beams come back while one token of the limit beside decodes is left."""
    jobs = [
        Job(prompt=(0, 0), max_tokens=2, beam_width=2, priority=1),
        Job(prompt=(0, 0, 0), max_tokens=4),
        Job(prompt=(0,), max_tokens=1, arrives_at=6),
        Job(prompt=(0,) * 5, max_tokens=1, arrives_at=11),
        Job(prompt=(*[0] * 12, 1, 0), max_tokens=4, n=3, cache_salt="tenant"),
    ]
    limits = Setting(num_blocks=22, block_size=2, budget=5, max_num_seqs=5, chunk_tokens=1)
    outcome = run(jobs, replace(limits, policy="priority", host_blocks=1))
    assert outcome.outputs == undisturbed(jobs)
    assert outcome.scheduler.stats.num_swaps > 0


def found_slowly(job: Job, seed: int) -> list[list[int]]:
    """Return what a search on lists finds, by the same log probabilities."""
    assert job.beam_width is not None
    ends = {END_TOKEN, *job.stop_token_ids} if not job.ignore_eos else set(job.stop_token_ids)

    def model(output: tuple[int, ...]) -> list[float]:
        context = (*job.prompt, *output)
        can_end = len(output) >= job.min_tokens
        logprobs = log_probabilities(seed, context, VOCAB_SIZE)
        return [-inf if token in ends and not can_end else logprob for token, logprob in enumerate(logprobs)]

    rules = Rules(
        job.beam_width,
        job.max_tokens,
        lambda output: output[-1] in ends,
        job.length_penalty,
        job.early_stopping,
        len(ends),
    )
    return [list(way.tokens) for way in search_slowly(model, rules)[: job.n]]


@settings(max_examples=100)
@given(job=searches, seed=st.integers(0, 1000))
def test_an_undisturbed_search_finds_what_the_slow_twin_finds(job: Job, seed: int) -> None:
    job = replace(job, media=(), min_tokens=min(seed % 3, job.max_tokens), abort_at=NEVER, arrives_at=0)
    harness = Harness(Setting())
    request = harness.add(job, seed)
    while harness.scheduler.has_unfinished:
        harness.step()
    assert outputs_of(request) == found_slowly(job, seed)
    assert len(request.sequences) <= 3


@pytest.mark.pairwise
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (2, 3, 4, 5))])
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
@pytest.mark.parametrize(
    "drafts",
    ["", "guesser", pytest.param("model", marks=pytest.mark.slow)],
)
def test_long_runs(seed: int, setting: Setting, drafts: str) -> None:
    jobs = random_jobs(random.Random(seed), 20)
    outcome = run(jobs, replace(setting, drafts=drafts))
    for job, samples, expected in zip(jobs, outcome.outputs, undisturbed(jobs), strict=True):
        assert agrees(job, samples, expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.parametrize("specs", [FULL, (*FULL, WINDOW), (*FULL, STATE)], ids=["full", "full and window", "states"])
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.slow), "swap"])
def test_long_runs_with_media(seed: int, specs: tuple[KVCacheSpec, ...], mode: str) -> None:
    jobs = with_media(random_jobs(random.Random(seed), 40))
    setting = Setting(
        num_blocks=19, budget=16, max_num_seqs=8, specs=specs, preemption_mode=mode, host_blocks=40 * (mode == "swap")
    )
    outcome = run(jobs, setting)
    for job, samples, expected in zip(jobs, outcome.outputs, undisturbed(jobs), strict=True):
        assert agrees(job, samples, expected)
    assert outcome.scheduler.stats.prefix_hits > 10


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
@pytest.mark.parametrize(
    "setting",
    [
        Setting(num_blocks=44, budget=20, max_num_seqs=20, watermark=1),
        Setting(num_blocks=44, budget=20, max_num_seqs=20, caching=False, preemption_policy="least_waste"),
        Setting(num_blocks=165, block_size=1, budget=64, max_num_seqs=16, policy="priority"),
        Setting(num_blocks=15, block_size=16, budget=12, max_num_seqs=12, watermark=1),
        Setting(num_blocks=44, budget=20, max_num_seqs=20, watermark=1, specs=(*FULL, WINDOW)),
        Setting(num_blocks=16, budget=32, max_num_seqs=16, specs=(WINDOW,)),
        Setting(num_blocks=32, budget=64, max_num_seqs=16, specs=(ChunkedLocal(block_size=4, chunk=10), WINDOW)),
        Setting(num_blocks=6, budget=64, max_num_seqs=16, specs=(STATE,), snapshot_interval=8),
        Setting(num_blocks=27, budget=20, max_num_seqs=20, watermark=1, specs=(*FULL, STATE), snapshot_interval=4),
        Setting(num_blocks=44, budget=20, max_num_seqs=20, preemption_mode="swap", host_blocks=90),
        Setting(num_blocks=44, budget=20, max_num_seqs=20, preemption_policy="least_waste", host_blocks=25),
        Setting(
            num_blocks=27, budget=20, max_num_seqs=20, preemption_mode="swap", host_blocks=60, specs=(*FULL, STATE)
        ),
    ],
    ids=[
        "tight",
        "least waste, no caching",
        "priority, blocks of one token",
        "tiny budget",
        "full and window",
        "windows",
        "chunks and windows",
        "states",
        "full and states",
        "swap",
        "least waste, small host",
        "full and states, swap",
    ],
)
def test_long_runs_with_beams(seed: int, setting: Setting) -> None:
    jobs = with_beams(random_jobs(random.Random(seed), 30), 4)
    outcome = run(jobs, setting)
    for job, found, expected in zip(jobs, outcome.outputs, undisturbed(jobs), strict=True):
        assert agrees(job, found, expected)


@pytest.mark.parametrize("policy", ["last", "least_waste"])
@pytest.mark.parametrize("host_blocks", [0, 20, pytest.param(90, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("specs", "num_blocks"),
    [
        pytest.param(FULL, 36, id="full"),
        pytest.param((*FULL, WINDOW), 26, id="full and window", marks=pytest.mark.slow),
        pytest.param((*FULL, STATE), 20, id="full and states", marks=pytest.mark.slow),
    ],
)
def test_searches_that_crowd_each_other(
    specs: tuple[KVCacheSpec, ...], num_blocks: int, host_blocks: int, policy: str
) -> None:
    """There is just room for one to its end: they swap where they can, and else begin again, and find the same."""
    jobs = crowd()
    mode = "swap" if host_blocks else "recompute"
    setting = Setting(
        num_blocks=num_blocks,
        max_num_seqs=24,
        specs=specs,
        host_blocks=host_blocks,
        preemption_mode=mode,
        preemption_policy=policy,
        snapshot_interval=4,
    )
    outcome = run(jobs, setting)
    assert outcome.outputs == undisturbed(jobs)
    stats = outcome.scheduler.stats
    searches = [request for request in outcome.requests if request.search is not None]
    assert sum(request.num_preemptions > 0 for request in searches) >= 3
    if not host_blocks:
        assert stats.num_swaps == 0
        assert stats.wasted_tokens > 100
    elif host_blocks == 90:
        assert stats.num_swaps == stats.num_preemptions > 10
        assert stats.wasted_tokens == 0


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
