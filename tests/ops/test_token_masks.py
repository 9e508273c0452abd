"""Masks of tokens: every backend forbids what the reference does, bit by bit, and touches nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from quire.ops.reference.reference_ops import ReferenceOps
from tests.ops.backends import BACKENDS, Backend

pytestmark = pytest.mark.pairwise


def random_masks(num_rows: int, num_tokens: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return masks of which words are random, all set, and all clear."""
    num_words = -(-num_tokens // 32)
    words = torch.randint(-(2**31), 2**31, (num_rows, num_words), generator=generator).int()
    kind = torch.randint(0, 4, (num_rows, num_words), generator=generator)
    return list(words.masked_fill_(kind == 0, 0).masked_fill_(kind == 1, -1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 61, 1000, 8192, 20_011])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_tokens_without_a_bit_are_forbidden(backend: Backend, num_tokens: int, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows + 2, num_tokens, generator=generator)
    logits[:, :num_tokens:7] = -torch.inf
    rows = torch.randperm(num_rows + 2, generator=generator)[:num_rows].tolist()
    masks = random_masks(num_rows, num_tokens, generator)
    expected, given = logits.clone(), logits.to(backend.device)
    ReferenceOps().apply_token_bitmask(expected, rows, masks)
    backend.make().apply_token_bitmask(given, rows, masks)
    assert torch.equal(given.cpu(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_many_rows_at_once(backend: Backend, num_threads: int) -> None:
    generator = torch.Generator().manual_seed(5)
    num_tokens = 70_001
    logits = torch.randn(40, num_tokens, generator=generator)
    rows = torch.randperm(40, generator=generator)[:33].tolist()
    masks = random_masks(33, num_tokens, generator)
    expected = logits.clone()
    for row, mask in zip(rows, masks, strict=True):
        bits = (mask.unsqueeze(1) >> torch.arange(32)).flatten()[:num_tokens] & 1
        expected[row, bits == 0] = -torch.inf
    given = logits.to(backend.device)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        backend.make().apply_token_bitmask(given, rows, masks)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(given.cpu(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_lie_apart_and_none(backend: Backend) -> None:
    generator = torch.Generator().manual_seed(6)
    whole = torch.randn(4, 200, generator=generator)
    masks = random_masks(2, 100, generator)
    expected = whole.clone()
    ReferenceOps().apply_token_bitmask(expected[:, :100], [3, 1], masks)
    ReferenceOps().apply_token_bitmask(expected.T[100:].T, [], [])
    views: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda given: given[:, :100],
        lambda given: given[:, :100].t().contiguous().t(),
    )
    for view in views:
        given = whole.to(backend.device)
        part = view(given)
        backend.make().apply_token_bitmask(part, [3, 1], masks)
        backend.make().apply_token_bitmask(part, [], [])
        assert torch.equal(part.cpu(), expected[:, :100])
        assert torch.equal(given.cpu()[:, 100:], whole[:, 100:])
