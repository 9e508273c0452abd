"""Linear layers with every number of rows from 1 to 65: tiles and halves of tiles of all sizes."""

from __future__ import annotations

import pytest
import torch

from quire.ops.cpu.native_library import NativeLibrary
from quire.ops.cpu.native_ops import NativeOps
from quire.ops.interface.weight_formats import WeightFormat
from quire.ops.reference.reference_ops import ReferenceOps
from tests.ops.backends import LIBRARIES
from tests.ops.test_quantised_linear import FORMATS, options_of
from tests.ops.world import assert_near, randn


@pytest.mark.parametrize("level", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [None, *FORMATS])
def test_a_row_has_the_same_bits_in_every_number_of_rows(
    level: str, dtype: torch.dtype, name: WeightFormat | None
) -> None:
    library = NativeLibrary(level, LIBRARIES[level])
    quantization, options = (None, {}) if name is None else options_of(name)
    if quantization is None and dtype not in library.packed_types:
        pytest.skip("torch multiplies this type, and not the same way for every number of rows")
    weight, x = randn(83, 608, dtype=dtype) * 0.04, randn(65, 608, dtype=dtype, seed=1)
    linear = NativeOps(library, quantization).pack_linear(weight, **options)
    twin = ReferenceOps(quantization).pack_linear(weight, **options)
    every = linear(x)
    assert_near(every, twin(x))
    for num_rows in range(1, 65):
        assert torch.equal(linear(x[:num_rows]), every[:num_rows]), num_rows
