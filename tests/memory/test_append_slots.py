"""`append_slots` for several sequences, against the same command for one sequence after the other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire.memory import FullAttention, KVCacheManager, Namespace, RecurrentState, SlidingWindow, check
from quire.memory.results import TableDelta

SIZE = 4
FULL = FullAttention(block_size=SIZE)
WORLDS: dict[str, Callable[[], KVCacheManager]] = {
    "full": lambda: KVCacheManager([FULL], 24),
    "without a prefix cache": lambda: KVCacheManager([FULL], 24, enable_prefix_caching=False),
    "above a host": lambda: KVCacheManager([FULL], 24, host_bytes=9 * FULL.bytes_per_block, eviction="lfu"),
    "some are evicted last": lambda: KVCacheManager([FULL], 24, retention_limit=6),
    "full and window": lambda: KVCacheManager([FULL, SlidingWindow(window=6, block_size=SIZE)], 24),
    "full and state": lambda: KVCacheManager(
        [FULL, RecurrentState(block_size=SIZE, layer_bytes=FULL.bytes_per_block)], 24
    ),
}


def append_in_turn(memory: KVCacheManager, seq_ids: list[int], num_tokens: int) -> int:
    """Do what `append_slots` does for many, with one call a sequence."""
    for position, seq_id in enumerate(seq_ids):
        if not memory.append_slots((seq_id,), num_tokens):
            return position
    return len(seq_ids)


class World:
    """A manager, and the token lists of its sequences."""

    def __init__(self, memory: KVCacheManager) -> None:
        self.memory = memory
        self.tokens: dict[int, list[int]] = {}

    def open(self, seq_id: int, prompt: list[int]) -> None:
        chain = self.memory.chain(prompt, Namespace())
        hit = self.memory.match_prefix(chain)
        self.memory.allocate(seq_id, chain, hit)
        if self.memory.append_slots((seq_id,), len(prompt) - hit.num_tokens):
            self.tokens[seq_id] = prompt
            self.memory.publish(seq_id, len(prompt))
        else:
            self.memory.free(seq_id)

    def fork(self, parent_id: int, child_id: int) -> None:
        self.tokens[child_id] = self.tokens[parent_id].copy()
        self.memory.fork(parent_id, child_id, self.tokens[child_id])

    def free(self, seq_id: int) -> None:
        del self.tokens[seq_id]
        self.memory.free(seq_id, retain=seq_id % 2 == 0)

    def finish(self, seq_ids: list[int], num_tokens: int) -> None:
        """Have the new slots written."""
        for seq_id in seq_ids:
            self.tokens[seq_id] += [seq_id % 2] * num_tokens
            self.memory.publish(seq_id, len(self.tokens[seq_id]))


@pytest.mark.parametrize("make", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("seed", range(6))
def test_what_is_done_for_all_is_done_for_each_in_turn(make: Callable[[], KVCacheManager], seed: int) -> None:
    rng = random.Random(seed)
    together, in_turn = World(make()), World(make())
    num_refused = 0
    for step in range(60):
        if rng.random() < 0.4:
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 11))]
            for world in (together, in_turn):
                world.open(step, prompt.copy())
        live = list(together.tokens)
        if rng.random() < 0.1:
            for world in (together, in_turn):
                world.memory.reset_prefix_cache()
        if live and rng.random() < 0.3:
            for world in (together, in_turn):
                world.fork(live[0], 1000 + step)
        seq_ids = rng.sample(list(together.tokens), len(together.tokens))
        num_tokens = rng.choice((1, 1, 3, 6))
        num_served = together.memory.append_slots(seq_ids, num_tokens)
        assert num_served == append_in_turn(in_turn.memory, seq_ids, num_tokens)
        deltas: list[tuple[TableDelta, ...]] = [in_turn.memory.take_table_deltas((seq_id,))[0] for seq_id in seq_ids]
        assert together.memory.take_table_deltas(seq_ids) == deltas
        assert together.memory.take_ops() == in_turn.memory.take_ops()
        for world in (together, in_turn):
            world.finish(seq_ids[:num_served], num_tokens)
            for seq_id in seq_ids[num_served : num_served + 1]:
                world.free(seq_id)
        assert together.memory.usage() == in_turn.memory.usage()
        check(together.memory)
        num_refused += num_served < len(seq_ids)
    assert num_refused > 0
