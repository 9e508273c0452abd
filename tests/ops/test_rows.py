"""Rows of packed weights, looked up again."""

from __future__ import annotations

import pytest
import torch

from quire.ops.cpu.native_library import NativeLibrary
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.ops import KeepsRows
from tests.ops.backends import LIBRARIES
from tests.ops.world import randn

pytestmark = pytest.mark.pairwise


@pytest.mark.parametrize("level", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(200, 70), (64, 32), (3, 2)])
def test_rows_come_back_as_they_were(level: str, dtype: torch.dtype, num_rows: int, width: int) -> None:
    library = NativeLibrary(level, LIBRARIES[level])
    if dtype not in library.packed_types:
        pytest.skip("not packed at this level")
    weight = randn(num_rows, width, dtype=dtype)
    linear = NativeOps(library).pack_linear(weight)
    assert isinstance(linear, KeepsRows)
    for ids in (torch.arange(num_rows), torch.arange(num_rows).flip(0)[::2], torch.tensor([], dtype=torch.int64)):
        assert torch.equal(linear.rows(ids), weight[ids])


@pytest.mark.parametrize("level", LIBRARIES)
@pytest.mark.parametrize("bad_id", [-1, 70])
def test_rows_that_there_are_not(level: str, bad_id: int) -> None:
    """The last panel has room for more columns than there are."""
    library = NativeLibrary(level, LIBRARIES[level])
    for is_lossless in {False, library.lossless is not None}:
        linear = NativeOps(library, is_lossless=is_lossless).pack_linear(randn(70, 64, dtype=torch.bfloat16))
        assert isinstance(linear, KeepsRows)
        with pytest.raises(IndexError, match=f"from 0 to 69, got ids from .*{bad_id}"):
            linear.rows(torch.tensor([3, bad_id]))


@pytest.mark.parametrize("level", LIBRARIES)
def test_rounded_weights_have_no_rows_to_look_up(level: str) -> None:
    """A tied head asks this, and keeps a matrix for look-ups beside the rounded one."""
    ops = NativeOps(NativeLibrary(level, LIBRARIES[level]), "int8")
    assert not isinstance(ops.pack_linear(randn(70, 64, dtype=torch.bfloat16)), KeepsRows)
