"""Small worlds, searched completely: 2 sequences, vocabulary 2, 2 to 4 blocks of 1 or 2 tokens.

All worlds together have 42,876 states (up to the names of blocks, sequences and tokens) and 222,963 transitions, each
followed by every check there is; some minutes on one core. 8,791 of the states are those of windows and chunks alone,
3,205 those of two groups that take memory from each other, and 3,714 those of states, alone and beside full attention,
with lookahead. The worlds with resets have 422 more, those with hints and pins 1,783, those with two media 12,445, and
those with a host tier 18,126, every family being swapped out and in wherever that makes sense.
"""

from __future__ import annotations

import pytest

from tests.memory.search import Searched, search
from tests.memory.twin_pages import Kind
from tests.memory.world_size import WorldSize


@pytest.mark.parametrize(
    ("size", "max_prompt", "max_slots", "seen"),
    [
        (WorldSize(2, 1), 2, 3, Searched(476, 2951)),
        pytest.param(WorldSize(3, 1), 2, 3, Searched(1926, 12425), marks=pytest.mark.slow),
        pytest.param(WorldSize(3, 1, caching=False), 2, 3, Searched(465, 3518), marks=pytest.mark.slow),
        pytest.param(WorldSize(4, 1), 1, 2, Searched(1010, 5758), marks=pytest.mark.slow),
        pytest.param(WorldSize(2, 2), 2, 3, Searched(3557, 22610), marks=pytest.mark.slow),
        pytest.param(WorldSize(3, 2), 1, 3, Searched(7287, 43927), marks=pytest.mark.exhaustive),
        pytest.param(WorldSize(2, 1, kinds=(Kind("window", 2),)), 1, 3, Searched(784, 3529), marks=pytest.mark.slow),
        pytest.param(
            WorldSize(2, 2, kinds=(Kind("window", 2),)), 1, 4, Searched(5373, 27361), marks=pytest.mark.exhaustive
        ),
        pytest.param(WorldSize(2, 1, kinds=(Kind("chunk", 2),)), 1, 3, Searched(2587, 11813), marks=pytest.mark.slow),
        pytest.param(
            WorldSize(2, 1, kinds=(Kind(), Kind("window", 1))),
            2,
            2,
            Searched(4942, 23917),
            marks=pytest.mark.exhaustive,
        ),
        (WorldSize(2, 1, kinds=(Kind(), Kind("window", 2))), 1, 3, Searched(252, 1259)),
        pytest.param(
            WorldSize(2, 1, kinds=(Kind("state"),), interval=1), 1, 3, Searched(3233, 18863), marks=pytest.mark.slow
        ),
        pytest.param(
            WorldSize(2, 1, kinds=(Kind(), Kind("state")), interval=1),
            1,
            2,
            Searched(586, 3229),
            marks=pytest.mark.slow,
        ),
        (WorldSize(1, 2, kinds=(Kind(), Kind("state"))), 2, 3, Searched(249, 1710)),
    ],
)
def test_every_command_in_every_state(size: WorldSize, max_prompt: int, max_slots: int, seen: Searched) -> None:
    assert search(size, max_prompt=max_prompt, max_slots=max_slots) == seen


@pytest.mark.parametrize(
    ("size", "seen"),
    [(WorldSize(2, 1), Searched(342, 2214)), (WorldSize(1, 1, kinds=(Kind(), Kind("window", 1))), Searched(80, 466))],
)
def test_every_command_in_every_state_with_resets(size: WorldSize, seen: Searched) -> None:
    assert search(size, max_prompt=1, max_slots=2, has_resets=True) == seen


@pytest.mark.parametrize(
    ("size", "seen"),
    [
        pytest.param(WorldSize(2, 1, retention=1), Searched(568, 4615), marks=pytest.mark.slow),
        (WorldSize(1, 1, kinds=(Kind(), Kind("window", 1)), retention=1), Searched(106, 784)),
        pytest.param(WorldSize(2, 1, pins=1, retention=1), Searched(1062, 9671), marks=pytest.mark.slow),
    ],
)
def test_every_command_in_every_state_with_hints_and_pins(size: WorldSize, seen: Searched) -> None:
    assert search(size, max_prompt=1, max_slots=2, has_resets=True) == seen


@pytest.mark.parametrize(
    ("size", "max_slots", "num_sequences", "seen"),
    [
        (WorldSize(2, 1, media=True), 2, 2, Searched(676, 3603)),
        pytest.param(WorldSize(2, 2, media=True), 3, 1, Searched(7862, 24679), marks=pytest.mark.exhaustive),
        pytest.param(WorldSize(1, 2, media=True), 2, 2, Searched(3907, 22682), marks=pytest.mark.slow),
    ],
)
def test_every_command_in_every_state_with_two_media(
    size: WorldSize, max_slots: int, num_sequences: int, seen: Searched
) -> None:
    assert search(size, max_prompt=size.block_size, max_slots=max_slots, num_sequences=num_sequences) == seen


@pytest.mark.parametrize(
    ("size", "max_prompt", "max_slots", "seen"),
    [
        (WorldSize(1, 1, host_blocks=1), 1, 1, Searched(250, 1454)),
        pytest.param(WorldSize(2, 1, host_blocks=1), 1, 2, Searched(1492, 9621), marks=pytest.mark.slow),
        pytest.param(WorldSize(2, 2, host_blocks=1), 1, 1, Searched(189, 1096), marks=pytest.mark.slow),
        pytest.param(
            *(WorldSize(1, 1, kinds=(Kind(), Kind("window", 1)), host_blocks=2), 1, 2, Searched(978, 5766)),
            marks=pytest.mark.slow,
        ),
        pytest.param(WorldSize(2, 1, host_blocks=1), 2, 2, Searched(6305, 44063), marks=pytest.mark.exhaustive),
        pytest.param(WorldSize(2, 2, host_blocks=1), 1, 3, Searched(16970, 117657), marks=pytest.mark.exhaustive),
    ],
)
def test_every_swap_in_every_state(size: WorldSize, max_prompt: int, max_slots: int, seen: Searched) -> None:
    assert search(size, max_prompt=max_prompt, max_slots=max_slots) == seen
