"""The prefix tree as segments, against a plain set of all prefixes that were published."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.kv import prefix_tree
from quire.engine.kv.prefix_tree import Segment, TreeScan, scan_tree
from quire.memory import FullAttention, KVCacheManager, Namespace

SIZE = 2
VIEWER = Namespace("model")


class Cache:
    """A manager whose sequences are stored whole at once."""

    def __init__(self, num_blocks: int = 400) -> None:
        self.manager = KVCacheManager([FullAttention(block_size=SIZE)], num_blocks)
        self._num_seqs = 0

    def store(self, tokens: list[int], namespace: Namespace = VIEWER) -> int:
        self._num_seqs += 1
        chain = self.manager.chain(tokens, namespace)
        hit = self.manager.match_prefix(chain)
        self.manager.allocate(self._num_seqs, chain, hit)
        assert self.manager.append_slots([self._num_seqs], len(tokens) - hit.num_tokens)
        self.manager.publish_each({self._num_seqs: len(tokens)})
        self.manager.take_ops()
        return self._num_seqs

    def scan(self, viewer: Namespace = VIEWER) -> TreeScan:
        scheduler: Any = SimpleNamespace(memory=self.manager)
        return scan_tree(scheduler, viewer)


def path_of(scan: TreeScan, segment: Segment) -> tuple[Segment, ...]:
    before = () if segment.parent is None else path_of(scan, scan.segments[segment.parent])
    return (*before, segment)


@pytest.mark.parametrize("seed", range(3))
def test_segments_are_the_published_prefixes_with_their_holders(seed: int) -> None:
    draw, cache = random.Random(seed), Cache()
    prefixes: set[tuple[int, ...]] = set()
    holders: Counter[tuple[int, ...]] = Counter()
    for _ in range(40):
        tokens = [draw.randrange(2) for _ in range(SIZE * draw.randrange(1, 6))]
        seq_id, own = cache.store([*tokens, 7]), [tuple(tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)]
        prefixes.update(own)
        if draw.random() < 0.5:
            holders.update(own)
        else:
            cache.manager.free(seq_id)
    scan = cache.scan()
    # A freed sequence publishes the rest of its last block as a tail, which is no whole block.
    whole = [segment for segment in scan.segments if (segment.end_token - segment.first_token) % SIZE == 0]
    assert scan.is_whole
    assert len(prefixes) == sum((segment.end_token - segment.first_token) // SIZE for segment in whole)
    for segment in whole:
        tokens = [token for part in path_of(scan, segment) for token in part.label_ids or ()]
        assert len(tokens) == segment.end_token, "labels of so few tokens are whole"
        assert tuple(tokens) in prefixes
        first = tuple(tokens[: segment.first_token + SIZE])
        assert segment.holders == holders[first]
    for at, segment in enumerate(scan.segments):
        assert segment.parent is None or segment.parent < at
        assert segment.num_children == sum(each.parent == at for each in scan.segments)


def test_segments_with_the_most_holders_come_first_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache()
    for other in range(20):
        cache.store([1, 1, other, other, 5])
    cache.store([3, 3, 5])
    monkeypatch.setattr(prefix_tree, "MAX_SEGMENTS", 6)
    scan = cache.scan()
    assert not scan.is_whole
    assert [segment.holders for segment in scan.segments] == [20, 1, 1, 1, 1, 1]
    assert scan.segments[0].num_children == 20
    monkeypatch.setattr(prefix_tree, "MAX_SEGMENTS", 60)
    assert cache.scan().is_whole
    # Of many branches at one place so many are looked at, the latest.
    monkeypatch.setattr(prefix_tree, "MAX_VISITED", 10)
    scan = cache.scan()
    assert not scan.is_whole
    assert max(segment.label_ids[0] for segment in scan.segments if segment.label_ids) == 19


def test_an_evicted_segment_stays_with_a_mark_while_others_follow_it() -> None:
    cache = Cache(num_blocks=4)
    cache.manager.free(cache.store([1, 1, 2, 2, 5]))
    assert all(segment.pool == 0 and segment.block for segment in cache.scan().segments)
    cache.manager.free(cache.store([8, 8, 9, 9, 10, 10, 5]))
    gone = [segment for segment in cache.scan().segments if segment.pool is None]
    assert gone
    assert all(segment.block == 0 and segment.holders == 0 for segment in gone)


def test_a_tenant_sees_its_own_and_tokens_are_those_of_the_viewer_s_namespace() -> None:
    cache = Cache()
    acme = VIEWER._replace(tenant="acme")
    for token, namespace in enumerate((VIEWER, acme, acme._replace(cache_salt="x"), VIEWER._replace(tenant="zeta"))):
        cache.store([token, token, 5], namespace)
    assert sorted(segment.label_ids is None for segment in cache.scan().segments) == [False, True, True, True]
    seen = cache.scan(acme).segments
    assert {tuple(segment.label_ids) if segment.label_ids else None for segment in seen} == {(1, 1), None}
    assert len(seen) == 2
    assert cache.scan(VIEWER._replace(tenant="nobody")) == TreeScan((), is_whole=True)
