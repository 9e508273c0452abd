"""Random jobs for the scheduler and scarce settings for them, and what they give when nothing disturbs them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

from hypothesis import strategies as st

from quire.memory import ChunkedLocal, FullAttention, KVCacheSpec, MediaSpan, RecurrentState, SlidingWindow
from tests.scheduling.harness import NEVER, VOCAB_SIZE, Job, Setting, run

FULL = (FullAttention(block_size=4),)
WINDOW = SlidingWindow(block_size=4, window=9)
STATE = RecurrentState(block_size=4, layer_bytes=FULL[0].bytes_per_block)
# In prompts that are long enough for them.
FOX, KITE = MediaSpan(1, 5, b"fox"), MediaSpan(1, 5, b"kite")

samples = st.builds(
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
searches = st.builds(
    lambda job, width, penalty, stopping: replace(
        job, n=min(job.n, width), beam_width=width, length_penalty=penalty, early_stopping=stopping
    ),
    samples,
    st.sampled_from([2, 3]),
    st.sampled_from([1.0, 0.0, 2.0]),
    st.sampled_from([False, True, "never"]),
)
jobs = samples | samples | searches


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
    """Settings in which everything is scarce, but every job (of at most 23 tokens, 3 samples or beams) can end."""
    block_size = draw(st.integers(1, 5))
    max_num_seqs = draw(st.integers(3, 8))
    # A prompt of 14 tokens, and 9 further ones for each of 3 beams.
    least = 14 // block_size + 3 * (-(-23 // block_size) - 14 // block_size)
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
    return _undisturbed(tuple(replace(job, abort_at=NEVER, arrives_at=0) for job in jobs))


@lru_cache(maxsize=32)  # many settings run the same jobs
def _undisturbed(jobs: tuple[Job, ...]) -> list[list[list[int]]]:
    return run(list(jobs), Setting(caching=False), is_audited=False).outputs


def agrees(job: Job, samples: list[list[int]], expected: list[list[int]]) -> bool:
    """Tell whether samples are the expected ones, or, after an abort, beginnings of them."""
    if job.abort_at == NEVER:
        return samples == expected
    if job.beam_width is not None:
        # What a search had found when it was aborted says nothing of what it would find.
        return True
    return all(tokens == whole[: len(tokens)] for tokens, whole in zip(samples, expected, strict=False))


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


def with_beams(jobs: list[Job], width: int) -> list[Job]:
    """Return the same jobs in quicker succession; every second one is a search, most of those to the full length."""
    stoppings = (False, True, "never")
    return [
        replace(job, arrives_at=job.arrives_at // 4)
        if i % 2
        else replace(
            job,
            arrives_at=job.arrives_at // 4,
            beam_width=width,
            n=min(job.n, width),
            early_stopping=stoppings[i % 3],
            ignore_eos=i % 8 > 0,
        )
        for i, job in enumerate(jobs)
    ]


def with_media(jobs: list[Job]) -> list[Job]:
    """Return the same token ids, of one medium or another, here or there."""
    choices = [(), (FOX,), (KITE,), (FOX._replace(start=6),), (FOX, KITE._replace(start=12, num_tokens=9))]
    return [replace(job, media=choices[i % 5]) for i, job in enumerate(jobs)]


def crowd() -> list[Job]:
    """Return searches and samples that grow far beyond their prompts, all at once."""
    rng = random.Random(1)
    return [
        Job(
            prompt=tuple(rng.randrange(12) for _ in range(8 + rng.randrange(8))),
            max_tokens=20 + rng.randrange(9),
            beam_width=4 if i % 3 else None,
            ignore_eos=True,
        )
        for i in range(16)
    ]
