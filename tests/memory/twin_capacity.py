"""The pages that a sequence needs at its worst moment, found by trying every way to cut it into steps."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from tests.memory.twin_pages import Pages

if TYPE_CHECKING:
    from tests.memory.twin import Twin


def peak(twin: Twin, idx: int, num_tokens: int, step: int) -> int:
    """Return the most pages of a group that a sequence holds at once, trying every way to cut it into steps."""
    return max(
        len(twin.alive(idx, done, done + count))
        for done, count in product(range(num_tokens), range(1, step + 1))
        if done + count <= num_tokens
    )


def joint_peak(twin: Twin, num_tokens: int) -> int:
    """Return the most pages of all groups that a sequence holds at once when it grows token by token."""
    return max(
        sum(len(twin.alive(idx, done, done + 1)) for idx in range(len(twin.groups))) for done in range(num_tokens)
    )


def least_needed(twin: Twin, idx: int, num_tokens: int, hit: Pages, start: int, step: int) -> int:
    """Return the pages that a sequence needs beyond the idle ones of its hit, at the worst moment."""
    idle = twin.groups[idx].idle
    num_idle = sum(page in idle for page in hit)
    most = 0
    for done, count in product(range(start, num_tokens), range(1, step + 1)):
        if done + count <= num_tokens:
            alive = twin.alive(idx, done, done + count)
            mine = [i for i in alive if i < start // twin.page_size and not twin.is_on_host(idx, hit[i])]
            most = max(most, len(alive) - sum(hit[i] not in idle for i in mine))
    return most - num_idle
