"""Checkers: drivers that run histories through memory and the scheduler and check everything; honest code passes."""

from __future__ import annotations

import random

from quire.errors import InvariantViolation
from quire.memory import FullAttention
from tests.memory.search import search
from tests.memory.twin_pages import Kind
from tests.memory.walk import random_walk
from tests.memory.world import World
from tests.memory.world_size import WorldSize
from tests.scheduling.harness import Harness, Setting, outputs_of, run
from tests.scheduling.random_jobs import STATE, WINDOW, agrees, crowd, random_jobs, undisturbed, with_media
from tests.scheduling.test_random_runs import found_slowly

FULL = Kind()
# A corrupt table may also end in a failed look-up, a wrong count in a victim that is missing.
FAILURES = (AssertionError, InvariantViolation, LookupError, StopIteration, ValueError)
GROUPS = ((FULL,), (FULL, FULL), (FULL, Kind("window", 3)), (Kind("window", 4),), (Kind("chunk", 4), FULL))
STATES = ((Kind("state"),), (FULL, Kind("state")), (Kind("state"), Kind("window", 3), FULL))


def walk(*, has_reference: bool) -> None:
    """Random commands in small pools; without the reference also in groups with blocks of different sizes."""
    for seed in range(12 if not has_reference else 0):
        size = WorldSize(0, 1, kinds=(FULL, Kind("window", 3)), layers=(1, 4), num_bytes=72)
        random_walk(World(size, has_twin=False), random.Random(seed), 60)
    for seed in range(16):
        rng = random.Random(seed)
        num_blocks, kinds = rng.randrange(3, 8), rng.choice(GROUPS)
        size = WorldSize(num_blocks, 2, kinds=kinds, pins=seed % 3, retention=rng.randrange(1, num_blocks))
        random_walk(World(size, has_twin=has_reference), rng, 100)
    for seed in range(30):
        rng = random.Random(seed)
        size = WorldSize(rng.randrange(2, 9), rng.randrange(1, 4), kinds=rng.choice(GROUPS))
        random_walk(World(size, has_twin=has_reference), rng, 60)
    for seed in range(30):
        rng = random.Random(seed)
        block_size = rng.randrange(1, 4)
        interval = rng.choice((None, block_size, 2 * block_size))
        size = WorldSize(rng.randrange(2, 9), block_size, kinds=rng.choice(STATES), interval=interval)
        random_walk(World(size, has_twin=has_reference), rng, 60)


def host_walk(*, has_reference: bool) -> None:
    """Random commands in small pools over a host tier, swaps among them."""
    for seed in range(16 if not has_reference else 0):
        size = WorldSize(0, 1, kinds=(FULL, Kind("window", 3)), layers=(1, 4), num_bytes=72, host_bytes=90)
        random_walk(World(size, has_twin=False), random.Random(seed), 100)
    for seed in range(40):
        rng = random.Random(seed)
        size = WorldSize(
            rng.randrange(2, 9), rng.randrange(1, 4), kinds=rng.choice(GROUPS), host_blocks=rng.randrange(1, 10)
        )
        random_walk(World(size, has_twin=has_reference), rng, 60)


def media_walk(*, has_reference: bool) -> None:
    """Random commands for prompts with media, on the device alone, over a host tier, and over a disk."""
    for seed in range(45):
        rng = random.Random(seed)
        size = WorldSize(rng.randrange(2, 9), rng.randrange(1, 4), kinds=rng.choice(GROUPS + STATES), media=True)
        if seed % 3:
            size = size._replace(kinds=rng.choice(GROUPS), host_blocks=rng.randrange(1, 9), has_disk=seed % 3 == 2)
        random_walk(World(size._replace(pins=seed % 2), has_twin=has_reference), rng, 80)


def disk_walk(*, has_reference: bool) -> None:
    """Random commands in small pools over a host tier and a disk, with loads."""
    for seed in range(10 if not has_reference else 0):
        size = WorldSize(
            0, 1, kinds=(FULL, Kind("window", 3)), layers=(1, 4), num_bytes=72, host_bytes=72, has_disk=True
        )
        random_walk(World(size, has_twin=False), random.Random(seed), 100)
    for seed in range(40):
        rng = random.Random(seed)
        size = WorldSize(rng.randrange(2, 9), rng.randrange(1, 4), kinds=rng.choice(GROUPS))
        size = size._replace(host_blocks=rng.randrange(1, 9), has_disk=True)
        random_walk(World(size, has_twin=has_reference), rng, 80)


def disk_read_back() -> None:
    """`check()` and reading through tables, with saves and loads among the copies."""
    disk_walk(has_reference=False)


def disk_reference() -> None:
    """The same, compared with the reference."""
    disk_walk(has_reference=True)


def media_read_back() -> None:
    """`check()` and reading through tables, for prompts with media."""
    media_walk(has_reference=False)


def media_reference() -> None:
    """The same, compared with the reference."""
    media_walk(has_reference=True)


def media_run() -> None:
    """The real scheduler on simulated slots that store the embeddings of media."""
    jobs = with_media(random_jobs(random.Random(2), 30))
    for setting in SETTINGS:
        outcome = run(jobs, setting, is_audited=False)
        assert all(map(agrees, jobs, outcome.outputs, undisturbed(jobs)))


def media_world() -> None:
    """A complete search of small worlds with two media."""
    search(WorldSize(1, 2, media=True), max_prompt=2, max_slots=2, num_sequences=1)
    search(WorldSize(2, 1, media=True), max_prompt=1, max_slots=1)


def host_read_back() -> None:
    """`check()`, reading through tables and the host's index, and sharing kept by swaps, after random commands."""
    host_walk(has_reference=False)


def host_reference() -> None:
    """The same, compared with the reference."""
    host_walk(has_reference=True)


def host_world() -> None:
    """A complete search of the smallest worlds in which sequences are swapped, blocks demoted and tails shared."""
    search(WorldSize(2, 2, host_blocks=1), max_prompt=1, max_slots=1)
    search(WorldSize(2, 1, host_blocks=1), max_prompt=1, max_slots=2)


def walk_read_back() -> None:
    """`check()` and reading through tables, after random commands."""
    walk(has_reference=False)


def walk_reference() -> None:
    """The same, compared with the reference."""
    walk(has_reference=True)


def small_world() -> None:
    """A complete search of the smallest world in which sharing, copying and eviction all happen."""
    search(WorldSize(2, 2), max_prompt=2, max_slots=2)


def window_world() -> None:
    """The same with a sliding window."""
    search(WorldSize(1, 1, kinds=(FULL, Kind("window", 1))), max_prompt=1, max_slots=2)
    search(WorldSize(2, 1, kinds=(Kind("window", 2),)), max_prompt=1, max_slots=3)


def hinted_world() -> None:
    """The same with retained blocks and pins."""
    search(WorldSize(2, 1, pins=1, retention=1), max_prompt=1, max_slots=1, has_resets=True)


def state_world() -> None:
    """The same with a recurrent state, alone and with full attention."""
    search(WorldSize(2, 1, kinds=(Kind("state"),), interval=2), max_prompt=1, max_slots=3)
    search(WorldSize(1, 1, kinds=(FULL, Kind("state")), interval=1), max_prompt=1, max_slots=2)


SETTINGS = (
    Setting(num_blocks=19, budget=16, max_num_seqs=8, watermark=1),
    Setting(num_blocks=19, budget=16, max_num_seqs=8, specs=(FullAttention(block_size=4), WINDOW)),
    Setting(num_blocks=12, budget=16, max_num_seqs=8, specs=(FullAttention(block_size=4), STATE), snapshot_interval=8),
)


def scheduler_run() -> None:
    """The real scheduler on simulated slots, without audits: only errors that a worker or a client could notice."""
    jobs = random_jobs(random.Random(2), 30)
    for setting in SETTINGS:
        outcome = run(jobs, setting, is_audited=False)
        assert all(map(agrees, jobs, outcome.outputs, undisturbed(jobs)))


def audited_run() -> None:
    """The same, with the invariants of memory and scheduler checked after each step."""
    for setting in SETTINGS:
        run(random_jobs(random.Random(2), 30), setting)


def beam_run() -> None:
    """Beam searches and samples that have room for little more than one of them, audited at every step."""
    jobs = crowd()
    for mode, host_blocks in (("recompute", 0), ("swap", 90)):
        setting = Setting(num_blocks=36, max_num_seqs=24, preemption_mode=mode, host_blocks=host_blocks)
        outcome = run(jobs, setting)
        for seed, (job, found) in enumerate(zip(jobs, outcome.outputs, strict=True)):
            assert job.beam_width is None or found == found_slowly(job, seed)


def beam_reference() -> None:
    """Each beam search alone, compared with the reference on lists."""
    for seed, job in enumerate(crowd()):
        if job.beam_width is not None:
            harness = Harness(Setting())
            request = harness.add(job, seed)
            while harness.scheduler.has_unfinished:
                harness.step()
            assert outputs_of(request) == found_slowly(job, seed)
