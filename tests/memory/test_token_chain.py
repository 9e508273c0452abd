"""Block identities: computed once, and different wherever the KV differs."""

from __future__ import annotations

from array import array
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.memory import MediaSpan, Namespace, TokenChain
from quire.memory.prefix.prompt_embeddings import read_entries
from quire.memory.prefix.token_chain import block_digest, block_digests, num_common, root_of

BLOCK_SIZE = 3
PLAIN = Namespace()
ids = st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 1), max_size=20)
names = st.text(max_size=3) | st.sampled_from(["", "n", "s", "\x00", "s\x00", "\ud800"])
namespaces = st.builds(
    Namespace, model=names, adapter=st.none() | names, cache_salt=st.none() | names, tenant=st.none() | names
)


def chain_of(tokens: list[int], namespace: Namespace = PLAIN, key: bytes = b"") -> TokenChain:
    return TokenChain(tokens, root_of(namespace, key), BLOCK_SIZE)


def digests_of(chain: TokenChain, num_blocks: int) -> list[bytes]:
    digests = chain.digests(num_blocks)
    assert [chain.digest_before(idx) for idx in range(num_blocks)] == [chain.root.digest, *digests][:num_blocks]
    return digests


def all_digests(tokens: list[int], namespace: Namespace = PLAIN, key: bytes = b"") -> list[bytes]:
    return digests_of(chain_of(tokens, namespace, key), len(tokens) // BLOCK_SIZE)


@given(namespace=namespaces)
def test_an_encoded_namespace_can_be_read(namespace: Namespace) -> None:
    assert Namespace.deserialise(namespace.serialise()) == namespace


@given(tokens=ids, cuts=st.lists(st.integers(0, 20)))
def test_digests_do_not_depend_on_when_they_are_asked_for(tokens: list[int], cuts: list[int]) -> None:
    growing: list[int] = []
    chain = chain_of(growing)
    for cut in sorted(min(cut, len(tokens)) for cut in cuts):
        growing.extend(tokens[len(growing) : cut])
        chain.encode(len(growing) // BLOCK_SIZE)
        chain.digests(len(growing) // BLOCK_SIZE // 2)
    growing.extend(tokens[len(growing) :])
    assert digests_of(chain, len(tokens) // BLOCK_SIZE) == all_digests(tokens)


@given(tokens=ids, with_media=st.booleans(), data=st.data())
def test_blocks_known_one_by_one_are_those_known_at_once(
    tokens: list[int], with_media: bool, data: st.DataObject
) -> None:
    media = [MediaSpan(1, 3, b"d" * 16), MediaSpan(5, 1, b"e")] if with_media else []
    num_blocks = len(tokens) // BLOCK_SIZE
    chain, at_once = (TokenChain(tokens, root_of(PLAIN, b""), BLOCK_SIZE, media) for _ in range(2))
    at_once.encode(num_blocks)
    contents = {idx: chain.content(idx) for idx in data.draw(st.permutations(range(num_blocks)))}
    assert [contents[idx] for idx in range(num_blocks)] == [at_once.content(idx) for idx in range(num_blocks)]
    assert (chain.data, chain.entries) == (at_once.data, at_once.entries)
    assert digests_of(chain, num_blocks) == digests_of(at_once, num_blocks)
    assert chain.fresh().digests(num_blocks) == at_once.digests(num_blocks)


@given(tokens=ids, more=ids, data=st.data())
def test_truncate_then_append_is_as_if_always_so(tokens: list[int], more: list[int], data: st.DataObject) -> None:
    keep = data.draw(st.integers(0, len(tokens)))
    owned = list(tokens)
    chain = chain_of(owned)
    chain.digests(len(tokens) // BLOCK_SIZE)
    chain.truncate(keep)
    del owned[keep:]
    owned.extend(more)
    num_blocks = len(owned) // BLOCK_SIZE
    assert digests_of(chain, num_blocks) == all_digests(tokens[:keep] + more)
    assert [chain.content(idx) for idx in range(num_blocks)] == contents_of(owned, [])


@given(tokens=ids, left=ids, right=ids)
def test_forks_go_their_own_ways(tokens: list[int], left: list[int], right: list[int]) -> None:
    parent_tokens, child_tokens = list(tokens), list(tokens)
    parent = chain_of(parent_tokens)
    parent.digests(len(tokens) // BLOCK_SIZE)
    child = parent.fork(child_tokens)
    parent_tokens.extend(left)
    child_tokens.extend(right)
    assert digests_of(parent, len(parent_tokens) // BLOCK_SIZE) == all_digests(tokens + left)
    assert digests_of(child, len(child_tokens) // BLOCK_SIZE) == all_digests(tokens + right)


@given(left=ids, right=ids)
def test_equal_digests_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    pairs = list(zip(all_digests(left), all_digests(right), strict=False))
    for i, (one, other) in enumerate(pairs):
        end = (i + 1) * BLOCK_SIZE
        assert (one == other) == (left[:end] == right[:end])


@given(one=namespaces, other=namespaces)
def test_no_two_namespaces_encode_alike(one: Namespace, other: Namespace) -> None:
    assert (one.serialise() == other.serialise()) == (one == other)
    assert (chain_of([], one).root == chain_of([], other).root) == (one == other)


@pytest.mark.parametrize(
    "others",
    [
        (Namespace("ab", "c"), Namespace("a", "bc"), Namespace("abc")),
        (Namespace("a", None, "b"), Namespace("a", "b", None), Namespace("a", "b", "")),
        (Namespace("a", None), Namespace("a", ""), Namespace("a", "None"), Namespace("a", "n")),
        (Namespace("a", None, "b"), Namespace("a", None, None, "b"), Namespace("a", None, "b", "b")),
    ],
)
def test_names_do_not_flow_into_each_other(others: tuple[Namespace, ...]) -> None:
    assert len({namespace.serialise() for namespace in others}) == len(others)


def test_the_same_tokens_elsewhere_have_another_identity() -> None:
    digests = all_digests([1, 2, 3, 1, 2, 3])
    assert digests[0] != digests[1]


def test_a_secret_key_changes_every_identity() -> None:
    tokens = list(range(9))
    keyed, other, plain = (all_digests(tokens, key=key) for key in (b"secret", b"Secret", b""))
    assert not set(keyed) & set(other)
    assert not set(keyed) & set(plain)
    with pytest.raises(ValueError, match="64"):
        chain_of(tokens, key=b"k" * 65)


def test_block_digests_depend_on_parent_and_content() -> None:
    digests = [block_digest(parent, content) for parent in (b"a" * 16, b"b" * 16) for content in (b"1", b"2")]
    assert len(set(digests)) == 4
    assert block_digests(b"a" * 16, (b"1", b"2")) == [digests[0], block_digest(digests[0], b"2")]


# ---- media ----

spans = st.lists(
    st.builds(MediaSpan, st.integers(0, 12), st.integers(1, 9), st.sampled_from([b"", b"a", b"b", b"ab" * 9])),
    max_size=3,
)


def contents_of(tokens: list[int], media: list[MediaSpan]) -> list[bytes]:
    chain = TokenChain(tokens, root_of(PLAIN, b""), BLOCK_SIZE, media)
    return [chain.content(idx) for idx in range(len(tokens) // BLOCK_SIZE)]


def rows_of(media: list[MediaSpan], block_idx: int) -> list[tuple[int, int, bytes]]:
    """Return which row of which medium stands where in a block, the slow way."""
    places = range(block_idx * BLOCK_SIZE, (block_idx + 1) * BLOCK_SIZE)
    runs = [(span, [place for place in places if span.start <= place < span.end]) for span in sorted(media)]
    return [(place, place - span.start, span.digest) for span, touched in runs for place in touched]


@given(tokens=ids, one=spans, other=spans)
def test_blocks_are_the_same_when_tokens_and_rows_of_media_are(
    tokens: list[int], one: list[MediaSpan], other: list[MediaSpan]
) -> None:
    left, right = contents_of(tokens, one), contents_of(tokens, other)
    for i in range(len(left)):
        assert (left[i] == right[i]) == (rows_of(one, i) == rows_of(other, i))
        found = read_entries(left[i][4 * BLOCK_SIZE :])
        assert all(-span.start <= i * BLOCK_SIZE and 0 < span.end <= BLOCK_SIZE for span in found)
        rows = [
            (i * BLOCK_SIZE + at, at - span.start, span.digest)
            for span in found
            for at in range(max(0, span.start), span.end)
        ]
        assert rows == rows_of(one, i)


@given(tokens=ids, media=spans, cuts=st.lists(st.integers(0, 20)))
def test_media_do_not_depend_on_when_they_are_asked_for(
    tokens: list[int], media: list[MediaSpan], cuts: list[int]
) -> None:
    growing: list[int] = []
    chain = TokenChain(growing, root_of(PLAIN, b""), BLOCK_SIZE, media)
    for cut in sorted(min(cut, len(tokens)) for cut in (*cuts, len(tokens))):
        growing.extend(tokens[len(growing) : cut])
        chain.digests(cut // BLOCK_SIZE)
    whole = contents_of(tokens, media)
    assert [chain.content(i) for i in range(len(whole))] == whole
    child = chain.fork(tokens.copy())
    for each in (chain, child):
        each.truncate(len(tokens) // 2)
        assert [each.content(i) for i in range(len(whole))] == whole, "media stay where they are"


@given(tokens=ids)
def test_without_media_a_block_is_its_tokens(tokens: list[int]) -> None:
    """Spelt out, so that what is on disk stays what it is."""
    digest, expected = chain_of(tokens, key=b"key").root.digest, []
    for i in range(len(tokens) // BLOCK_SIZE):
        content = b"".join(token.to_bytes(4, "little") for token in tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
        digest = blake2b(digest + content, digest_size=16).digest()
        expected.append((digest, content))
    chain = chain_of(tokens, key=b"key")
    assert [(chain.digests(i + 1)[i], chain.content(i)) for i in range(len(expected))] == expected


@pytest.mark.parametrize("span", [MediaSpan(-1, 3, b"a"), MediaSpan(0, 0, b"a"), MediaSpan(5, -1, b"a")])
def test_media_stand_for_tokens(span: MediaSpan) -> None:
    with pytest.raises(ValueError, match=f"got {span.start}, {span.num_tokens}"):
        TokenChain([], root_of(PLAIN, b""), BLOCK_SIZE, [span])


@pytest.mark.parametrize("cut", [slice(1, None), slice(-1), slice(8), slice(20)])
def test_what_is_cut_is_no_entry(cut: slice) -> None:
    entry = MediaSpan(2, 5, b"digest").entry(3, 6)
    assert read_entries(entry * 2) == [MediaSpan(-1, 4, b"digest")] * 2
    with pytest.raises(ValueError, match="must be encoded media entries"):
        read_entries(entry[cut])


@given(one=ids, other=ids)
def test_tokens_in_common_are_the_leading_ones(one: list[int], other: list[int]) -> None:
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert num_common(array("I", one).tobytes(), bytearray(array("I", other))) == expected
