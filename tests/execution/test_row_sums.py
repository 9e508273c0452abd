"""Sums of rows do not depend on how many rows there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quire.execution.sampling.logprobs import measure
from quire.execution.sampling.rows import chunk_sums, row_sums


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("width", [1, 127, 128, 50_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_alone_has_the_same_sums(width: int, dtype: torch.dtype) -> None:
    values = torch.randn((20, width), generator=torch.Generator().manual_seed(0)).to(dtype) * 1e3
    sums, totals = chunk_sums(values), row_sums(values)
    for row in range(20):
        assert torch.equal(chunk_sums(values[row : row + 1]), sums[row : row + 1])
        assert torch.equal(row_sums(values[row : row + 1]), totals[row : row + 1])
    torch.testing.assert_close(totals, values.sum(-1, keepdim=True, dtype=torch.float64), rtol=1e-9, atol=1e-6)


def test_a_row_alone_has_the_same_log_probabilities() -> None:
    logits = torch.randn((40, 65_536), generator=torch.Generator().manual_seed(0)) * 4
    together = measure(logits, [*range(40)], [2] * 40)
    assert [measure(logits[row : row + 1], [found.token_id], [2])[0] for row, found in enumerate(together)] == together
