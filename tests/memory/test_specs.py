"""The closed forms of cache specs, against counting token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.memory.specs import NEVER_FREED
from tests.memory.twin import Twin
from tests.memory.twin_capacity import peak
from tests.memory.twin_pages import Kind
from tests.memory.world_size import spec_of

block_sizes = st.integers(1, 5)
kinds = (
    st.just(Kind())
    | st.builds(Kind, st.just("window"), st.integers(1, 12))
    | st.builds(Kind, st.just("chunk"), st.integers(1, 12))
)


@given(kind=kinds, block_size=block_sizes, num_tokens=st.integers(0, 60))
def test_the_first_live_token_is_the_first_that_a_later_query_reads(
    kind: Kind, block_size: int, num_tokens: int
) -> None:
    spec = spec_of(kind, block_size)
    read = [t for t in range(num_tokens) if any(kind.reads(query, t) for query in range(num_tokens, num_tokens + 30))]
    assert spec.first_live_token(num_tokens) == (read[0] if read else num_tokens)


@given(kind=kinds, block_size=block_sizes, block_idx=st.integers(0, 12))
def test_a_block_dies_when_all_its_tokens_have(kind: Kind, block_size: int, block_idx: int) -> None:
    spec = spec_of(kind, block_size)
    freed_after = spec.freed_after(block_idx)
    if kind.name == "full":
        assert freed_after == NEVER_FREED
    else:
        first_live = [spec.first_live_token(length) // block_size for length in (freed_after - 1, freed_after)]
        assert first_live[0] <= block_idx < first_live[1]


@given(kind=kinds, block_size=block_sizes, num_tokens=st.integers(1, 40), step=st.integers(1, 40))
def test_the_peak_is_that_of_the_worst_way_to_cut_a_prompt_into_steps(
    kind: Kind, block_size: int, num_tokens: int, step: int
) -> None:
    twin = Twin(0, block_size, (kind,), watermark=0, caching=True)
    assert spec_of(kind, block_size).peak_blocks(num_tokens, step) == peak(twin, 0, num_tokens, step)


@pytest.mark.parametrize("kind", [Kind(), Kind("window", 128), Kind("chunk", 8192)], ids=lambda kind: kind.name)
def test_bytes_of_a_block(kind: Kind) -> None:
    spec = spec_of(kind, 16)
    assert spec.bytes_per_block == 16 * 1 * 2 * 1 * 1 * 1
    assert [spec.num_blocks(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
