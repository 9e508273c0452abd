"""Triton's products of rows with outliers lose no more than activations that are rounded in groups of 32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.ops.interface.ops import Linear
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.interface.weight_formats import WeightFormat
from tests.ops.outliers import RoundedOps
from tests.ops.test_outliers import NUM_COLUMNS, WIDTH, check_loss
from tests.ops.test_quantised_linear import FORMATS, options_of
from tests.ops.test_quantized_weights import FORMS, random_weight
from tests.ops.triton.device import DEVICE, MARKS, make_ops
from tests.ops.world import randn

from quire.ops.triton.triton_ops import TritonOps  # isort: skip - the module above skips where Triton is missing

pytestmark = MARKS
# Kernels of few rows, and of many.
NUM_ROWS = (2, 18)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def on_host(linear: Linear) -> Linear:
    """Return a layer whose rows come from the host, and go there."""

    def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
        return linear(x.to(DEVICE), residual).cpu()

    return run


@pytest.mark.parametrize("name", FORMS)
def test_stored_weights(name: str) -> None:
    weight = StoredWeight((random_weight(FORMS[name], NUM_COLUMNS, WIDTH),), torch.float32)
    exact, grouped = (RoundedOps(is_grouped=flag).pack_linear(weight) for flag in (False, True))
    check_loss(on_host(make_ops().pack_linear(weight)), exact, grouped, NUM_ROWS)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_are_rounded_while_loading(name: WeightFormat) -> None:
    quantization, options = options_of(name)
    weight = randn(NUM_COLUMNS, WIDTH) * WIDTH**-0.5
    served = TritonOps(torch.device(DEVICE), quantization).pack_linear(weight.to(DEVICE), **options)
    exact, grouped = (
        RoundedOps(quantization, is_grouped=flag).pack_linear(weight, **options) for flag in (False, True)
    )
    check_loss(on_host(served), exact, grouped, NUM_ROWS)
