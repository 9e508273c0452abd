"""The prefix tree, against plain dictionaries from whole prefixes to blocks."""

from __future__ import annotations

import random

import pytest

from quire.memory import MediaSpan, Namespace, TokenChain
from quire.memory.prefix.published import PublishedBlocks
from quire.memory.prefix.radix_tree import RadixTree
from quire.memory.prefix.token_chain import root_of

SIZE = 2
ROOTS = [root_of(Namespace(cache_salt=salt), b"key") for salt in (None, "salt")]
MEDIA = [(), (MediaSpan(1, 2, b"fox"),), (MediaSpan(1, 2, b"kite"),)]
# What is published, by all that it depends on: namespace, tokens with media, and the blocks of each slot.
Prefix = tuple[bytes, tuple[bytes, ...]]


def prefix_of(chain: TokenChain, num_blocks: int) -> Prefix:
    return chain.root.content, tuple(chain.fresh().content(idx) for idx in range(num_blocks))


class Forest:
    """A tree with two slots and its twin: a dictionary for each slot."""

    def __init__(self, seed: int, max_tombstones: int) -> None:
        self.rng = random.Random(seed)
        self.tree = RadixTree(SIZE, 2, 0)
        self.tree.max_tombstones = max_tombstones
        self.indexes = [PublishedBlocks(self.tree, slot, 1000) for slot in (0, 1)]
        self.twins: list[dict[Prefix, int]] = [{}, {}]
        self.ever: set[Prefix] = set()
        self.chains = [self.new_chain() for _ in range(12)]

    def new_chain(self) -> TokenChain:
        tokens = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 14))]
        return TokenChain(tokens, self.rng.choice(ROOTS), SIZE, self.rng.choice(MEDIA))

    def publish(self, chain: TokenChain) -> None:
        """Publish a run of a chain's blocks in some slots, wherever none is."""
        num_full = len(chain.tokens) // SIZE
        start = self.rng.randrange(num_full + 1)
        end = self.rng.randrange(start, num_full + 1)
        if start == end:
            return
        assert self.tree.insert(chain, end, start) == end
        for index, twin in zip(self.indexes, self.twins, strict=True):
            for block_idx in range(start, end):
                prefix, place = prefix_of(chain, block_idx + 1), self.tree.match(chain, end).position(block_idx)
                if prefix not in twin and (index is self.indexes[0] or self.rng.random() < 0.5):
                    block_id = self.rng.choice([idx for idx in range(1, 1000) if idx not in twin.values()])
                    index.put(place, block_id)
                    twin[prefix] = block_id
                    self.ever.add(prefix)

    def remove(self) -> None:
        slot = self.rng.randrange(2)
        gone = [prefix for prefix in self.twins[slot] if self.rng.random() < 0.4]
        self.indexes[slot].remove([self.twins[slot].pop(prefix) for prefix in gone])

    def step(self) -> None:
        chain = self.rng.choice(self.chains)
        kind = self.rng.random()
        if kind < 0.4:
            self.publish(chain)
        elif kind < 0.55:
            self.remove()
        elif kind < 0.7:
            length = self.rng.randrange(len(chain.tokens) + 1)
            chain.truncate(length)
            chain.tokens[length:] = [self.rng.randrange(2) for _ in range(self.rng.randrange(4))]
        elif kind < 0.8:
            self.chains.append(chain.fork([*chain.tokens, self.rng.randrange(2)]))
            self.chains.pop(self.rng.randrange(len(self.chains)))
        else:
            chain.tokens += [self.rng.randrange(2)]

    def verify(self) -> None:
        for index, twin in zip(self.indexes, self.twins, strict=True):
            assert sorted(index.block_ids()) == sorted(twin.values())
            assert len(index) == len(twin)
            for chain in (*self.chains, *(chain.fresh() for chain in self.chains)):
                num_full = len(chain.tokens) // SIZE
                start = self.rng.randrange(num_full + 1)
                expected = [twin.get(prefix_of(chain, idx + 1), 0) for idx in range(num_full)]
                assert index.published(chain, start, num_full) == expected[start:]
                assert index.leading(chain, num_full) == expected[: [*expected, 0].index(0)]
        for chain in self.chains:
            self.verify_children(chain)
            self.verify_memory(chain)
        leading = {prefix[1][:length] for twin in self.twins for prefix in twin for length in range(len(prefix[1]) + 1)}
        # Behind what is published, as many places as are remembered; before it, those that lead there.
        num_places = sum(node.length for node in self.tree.nodes())
        assert num_places <= 2 * len(leading) + self.tree.max_tombstones + 14 * len(self.chains)

    def verify_children(self, chain: TokenChain) -> None:
        num_blocks = self.rng.randrange(len(chain.tokens) // SIZE + 1)
        cursor = self.tree.match(chain, num_blocks)
        namespace, contents = prefix_of(chain, num_blocks)
        behind = [
            block_id
            for (known, theirs), block_id in self.twins[0].items()
            if known == namespace and len(theirs) == num_blocks + 1 and theirs[:-1] == contents
        ]
        if cursor.num_known < num_blocks or not cursor.nodes:
            assert not behind
            return
        node, position = cursor.position_after(num_blocks)
        places = node.children_at(position, 99)
        assert sorted(self.indexes[0].at(place) for place in places) == sorted(behind)
        for first in (b"\0\0\0\0", b"\1\0\0\0"):
            alike = [place for place in places if place[0].content(place[1])[: 4 * SIZE + 1].startswith(first)]
            plain = [place for place in alike if len(place[0].content(place[1])) == 4 * SIZE]
            assert node.children_at(position, 99, first) == plain

    def verify_memory(self, chain: TokenChain) -> None:
        num_full = len(chain.tokens) // SIZE
        for block_idx in range(min(num_full, self.tree.match(chain, num_full).num_known)):
            node, position = self.tree.match(chain, num_full).position(block_idx)
            assert node.content(position) == chain.content(block_idx)
            assert node.digest(position) == chain.fresh().digests(block_idx + 1)[block_idx]
            if position not in node.never_published:
                assert prefix_of(chain, block_idx + 1) in self.ever, "said to have been published"


@pytest.mark.parametrize("max_tombstones", [0, 3, 50])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_blocks_are_found_by_all_that_comes_before_them(seed: int, max_tombstones: int) -> None:
    forest = Forest(seed, max_tombstones)
    for _ in range(100):
        forest.step()
        forest.verify()


def test_a_long_prompt_is_one_stem_and_others_branch_off() -> None:
    tree = RadixTree(SIZE, 1, 0)
    tree.max_tombstones = 9
    tokens = list(range(100))
    index = PublishedBlocks(tree, 0, 200)
    for which, prompt in enumerate((tokens, [*tokens[:50], *range(500, 550)], [*tokens, 7, 7])):
        chain = TokenChain(prompt, ROOTS[0], SIZE)
        num_full, known = len(prompt) // SIZE, tree.match(chain, len(prompt) // SIZE).num_known
        assert tree.insert(chain, num_full, known) == num_full
        parts = list(tree.match(chain, num_full).ranges(known, num_full))
        index.put_ranges(parts, range(1 + 60 * which, 1 + 60 * which + num_full - known))
    root, first, branch = tree.nodes()
    assert [node.length for node in (root, first, branch)] == [0, 51, 25]
    assert (branch.parent, branch.first) == (first, 25)
    assert [place[0] for place in first.children_at(25, 9)] == [branch, first]
    index.remove(range(61, 86))
    assert [place[0] for place in first.children_at(25, 9)] == [first]
    index.remove(range(1, 51))
    index.remove([121])
    assert sum(node.length for node in tree.nodes()) <= 51 + tree.max_tombstones


def test_nothing_is_left_of_a_namespace_that_is_forgotten() -> None:
    tree = RadixTree(SIZE, 1, 0)
    index = PublishedBlocks(tree, 0, 9)
    for root in ROOTS:
        chain = TokenChain([1, 2, 3, 4], root, SIZE)
        tree.insert(chain, 2, 0)
        index.put_ranges(tree.match(chain, 2).ranges(0, 2), [1, 2])
        index.remove([2, 1])
        assert (tree.nodes(), tree.roots) == ([], {})
        assert index.published(chain, 0, 2) == [0, 0]


def test_stems_that_branch_off_each_other_are_taken_out_together() -> None:
    """As many as a long prompt has blocks: each prompt parts from the one before in its last block."""
    tree = RadixTree(SIZE, 1, 0)
    index = PublishedBlocks(tree, 0, 2000)
    tokens = [0, 0, 1, 1]
    for block_idx in range(700):
        chain = TokenChain(tokens.copy(), ROOTS[0], SIZE)
        num_known = tree.match(chain, block_idx + 2).num_known
        tree.insert(chain, block_idx + 2, block_idx)
        parts = list(tree.match(chain, block_idx + 2).ranges(num_known, block_idx + 2))
        index.put_ranges(parts, range(2 * block_idx + 1, 2 * block_idx + 3)[: block_idx + 2 - num_known])
        tokens[-2:] = [2, 2, 1, 1]
    assert len(tree.nodes()) > 650
    published = [block_id for block_id in range(1, 2000) if block_id in index]
    index.remove(published)
    assert tree.nodes() == []
