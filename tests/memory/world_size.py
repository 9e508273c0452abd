"""The sizes and options of a small world."""

from __future__ import annotations

from typing import NamedTuple

from quire.memory import ChunkedLocal, FullAttention, KVCacheSpec, RecurrentState, SlidingWindow
from tests.memory.twin_pages import Kind


class WorldSize(NamedTuple):
    """How small a world is.

    Args:
        num_blocks: of each cache group.
        block_size: tokens of a block.
        watermark: blocks left free at admission.
        caching: whether blocks are published.
        kinds: of the cache groups.
        layers: of each group, when their blocks are to be of different sizes.
        num_bytes: of the arena, then; `num_blocks` has no meaning.
        eviction: the policy; the twin knows the first only.
        host_blocks: of the host tier, shared by the groups, when their blocks are of one size; or
        host_bytes: of the host tier.
        pins: blocks of all groups that may be pinned.
        retention: blocks of all groups that may be retained.
        has_disk: what the host evicts is saved, and can be loaded.
        interval: tokens between regular snapshots of states, None for the default.
        media: whether prompts have media.
    """

    num_blocks: int
    block_size: int
    watermark: int = 0
    caching: bool = True
    kinds: tuple[Kind, ...] = (Kind(),)
    layers: tuple[int, ...] = ()
    num_bytes: int | None = None
    eviction: str = "lru"
    host_blocks: int = 0
    host_bytes: int = 0
    pins: int = 0
    retention: int = 0
    has_disk: bool = False
    interval: int | None = None
    media: bool = False


def spec_of(kind: Kind, block_size: int, num_layers: int = 1) -> KVCacheSpec:
    """Return the spec of a cache group, with two bytes for a token in a layer."""
    if kind.is_state:
        return RecurrentState(block_size=block_size, num_layers=num_layers, layer_bytes=2 * block_size)
    if kind.name == "window":
        return SlidingWindow(block_size=block_size, num_layers=num_layers, element_bytes=1, window=kind.extent)
    if kind.name == "chunk":
        return ChunkedLocal(block_size=block_size, num_layers=num_layers, element_bytes=1, chunk=kind.extent)
    return FullAttention(block_size=block_size, num_layers=num_layers, element_bytes=1)
