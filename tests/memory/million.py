"""A million random commands, each followed by every check, over worlds of all kinds.

    python -m tests.memory.million [--commands 1000000] [--jobs 2] [--seed 0]

The suite runs a short stretch of the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from quire.memory.pool.eviction import EVICTION_POLICIES
from tests.memory.twin_pages import Kind
from tests.memory.walk import random_walk
from tests.memory.world import World
from tests.memory.world_size import WorldSize

# Of a walk; in some of them there is nothing to do.
NUM_TURNS = 250
BATCH = 200
FULL = Kind()


class CountingWorld(World):
    """A world that counts the commands it was checked after.

    Attributes:
        num_commands: number of checked commands.
    """

    num_commands = 0

    def verify(self) -> None:
        """Check everything."""
        super().verify()
        self.num_commands += 1


def random_world(rng: random.Random) -> CountingWorld:
    """Return a small world of any kind; with a twin wherever the twin knows how the world behaves."""
    kinds = tuple(
        rng.choice((FULL, FULL, Kind("window", rng.randrange(1, 8)), Kind("chunk", rng.randrange(1, 8)), Kind("state")))
        for _ in range(rng.choice((1, 1, 2, 3)))
    )
    size = WorldSize(
        rng.randrange(1, 13), rng.randrange(1, 5), rng.randrange(3), caching=rng.random() < 0.9, kinds=kinds
    )
    size = size._replace(
        interval=rng.choice((None, size.block_size, 2 * size.block_size)),
        pins=rng.choice((0, 0, 1, 4)),
        retention=rng.choice((0, 0, 2, 5)),
    )
    host_blocks = rng.choice((0, 0, rng.randrange(1, 6), rng.randrange(6, 25)))
    if rng.random() < 0.5:
        return CountingWorld(size._replace(host_blocks=host_blocks))
    size = size._replace(eviction=rng.choice(tuple(EVICTION_POLICIES)))
    if len(kinds) > 1:
        # Blocks of different sizes, which move and are lent by the slab.
        layers = tuple(rng.randrange(1, 5) for _ in kinds)
        block_bytes = max(layers) * size.block_size * 2
        size = size._replace(
            layers=layers,
            num_bytes=block_bytes * 4 * rng.randrange(3, 10),
            host_bytes=block_bytes * 4 * rng.choice((0, 0, 3, 6, 10)),
        )
    else:
        size = size._replace(host_blocks=host_blocks)
    return CountingWorld(size, has_twin=False)


def walk(seed: int) -> int:
    """Issue random commands to one world; return how many it took."""
    rng = random.Random(seed)
    world = random_world(rng)
    try:
        random_walk(world, rng, NUM_TURNS, max_sequences=rng.randrange(2, 7))
    except BaseException as error:
        raise AssertionError(f"the walk with seed {seed} failed: {error!r}") from error
    return world.num_commands


def main(arguments: list[str]) -> None:
    """Walk, in several processes, and say how far."""
    parser = argparse.ArgumentParser(description="Random memory commands, everything checked after each.")
    parser.add_argument("--commands", type=int, default=1_000_000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    num_commands, num_walks = 0, 0
    with ProcessPoolExecutor(options.jobs) as pool:
        while num_commands < options.commands:
            first = options.seed + num_walks
            num_commands += sum(pool.map(walk, range(first, first + BATCH), chunksize=20))
            num_walks += BATCH
    print(
        f"{num_commands:,} commands in {num_walks:,} walks without a violation, "
        f"in {time.perf_counter() - started:.0f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
