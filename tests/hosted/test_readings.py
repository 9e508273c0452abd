"""Readings describe tensors that are made of stored ones, and keep codes where the arrangement allows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.hosted.readings import (
    ChunkReading,
    Computation,
    JoinedReading,
    Reading,
    StackedReading,
    StoredReading,
    TransposedReading,
    row_parts,
    values_of,
)
from quire.models.tensors.layer_weight import LayerWeight
from quire.ops.interface.quantized_weight import QuantizedRows, QuantizedWeight, WeightForm

FORM = WeightForm(8, 16, "float32", offset=128)


class Reader:
    """Plain tensors, and 8-bit codes [out, in] or [X, out, in] with a scale of 1 under names that begin with q."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors
        self.reads: list[str] = []

    def parts_of(self, name: str) -> tuple[str, ...]:
        return (f"{name}.codes", f"{name}.scales") if name.startswith("q") else (name,)

    def shape(self, name: str, wanted_by: str, *, integers: bool) -> tuple[int, ...]:
        assert wanted_by == "target"
        assert not integers
        return tuple(self.tensors[name].shape)

    def stack_shape(self, name: str) -> tuple[int, ...] | None:
        shape = tuple(self.tensors[name].shape)
        return shape if name.startswith("q") and len(shape) == 3 else None

    def read(self, name: str) -> Tensor | LayerWeight:
        self.reads.append(name)
        tensor = self.tensors[name]
        if not name.startswith("q"):
            return tensor
        rows = tensor.flatten(0, -2)

        def unpack(index: slice | Tensor) -> QuantizedRows:
            codes = (rows[index] + 128).to(torch.uint8)
            return QuantizedRows(codes, torch.ones(len(codes), codes.shape[1] // 16))

        return LayerWeight(QuantizedWeight(FORM, (len(rows), rows.shape[1]), unpack, rows.numel()))


def numbers(*shape: int, start: int = 0) -> Tensor:
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32).view(shape) + start) % 100


def stored(**tensors: Tensor) -> dict[str, Any]:
    reader: Any = Reader(**tensors)
    return {name: StoredReading(reader, name, "target") for name in tensors}


def check(reading: Reading, wanted: Tensor) -> None:
    """Values, parts and slices agree."""
    assert reading.shape == tuple(wanted.shape)
    assert torch.equal(reading.tensor(), wanted)
    assert torch.equal(torch.cat([values_of(part) for part in reading.parts()]).view(wanted.shape), wanted)
    slices = reading.slices()
    if slices is not None:
        assert torch.equal(torch.stack([item.tensor() for item in slices]), wanted)


@pytest.mark.parametrize("prefix", ["p", "q"])
def test_arrangements(prefix: str) -> None:
    """Experts by themselves, gate and up: merged, then joined, transposed, chunked; of values and of codes."""
    tensors = {f"{prefix}{idx}": numbers(4, 32, start=7 * idx) for idx in range(6)}
    readings = stored(**tensors)
    gates, ups = (StackedReading([readings[f"{prefix}{idx}"] for idx in range(first, first + 3)]) for first in (0, 3))
    both = JoinedReading([gates, ups], 1)
    wanted = torch.cat([torch.stack(list(tensors.values())[first : first + 3]) for first in (0, 3)], 1)
    check(gates, wanted[:, :4])
    check(both, wanted)
    check(JoinedReading([gates, ups], 0), torch.cat([wanted[:, :4], wanted[:, 4:]]))
    check(TransposedReading(both, 1, 2), wanted.mT)
    check(TransposedReading(both, 0, 1), wanted.transpose(0, 1))
    check(ChunkReading(readings[f"{prefix}0"], 0, 1, 3), tensors[f"{prefix}0"][1:3])
    check(ChunkReading(readings[f"{prefix}0"], 1, 16, 32), tensors[f"{prefix}0"][:, 16:])
    parts = row_parts(both)
    assert torch.equal(torch.cat([values_of(part) for part in parts]), wanted.flatten(0, 1))
    assert all(isinstance(part, LayerWeight) == (prefix == "q") for part in parts)
    assert both.is_quantized == (prefix == "q")
    assert both.names == tuple(tensors)


def test_codes_stay_in_ranges_of_outputs_and_in_stacks() -> None:
    readings = stored(q=numbers(6, 32), qs=numbers(3, 4, 32))
    (part,) = ChunkReading(readings["q"], 0, 2, 5).parts()
    assert isinstance(part, LayerWeight)
    check(readings["qs"], numbers(3, 4, 32))
    (part,) = row_parts(readings["qs"])
    assert isinstance(part, LayerWeight)


def test_a_computation_runs_once_for_its_results_and_not_for_shapes() -> None:
    readings = stored(p=numbers(4, 6))
    runs = []

    def halve(tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        (tensor,) = tensors["p"]
        runs.append(tensor.device.type)
        return dict(zip("ab", tensor.chunk(2, 1), strict=True))

    results = Computation({"p": [readings["p"]]}, halve).results()
    assert {name: reading.shape for name, reading in results.items()} == {"a": (4, 3), "b": (4, 3)}
    assert torch.equal(results["b"].tensor(), numbers(4, 6)[:, 3:])
    assert torch.equal(results["a"].tensor(), numbers(4, 6)[:, :3])
    assert runs == ["meta", "cpu"]


@pytest.mark.parametrize(("second", "message"), [(numbers(4, 30), "one shape"), (numbers(4), "one shape")])
def test_tensors_of_other_shapes_do_not_stack(second: Tensor, message: str) -> None:
    readings = stored(p0=numbers(4, 32), p1=second)
    with pytest.raises(CheckpointError, match=message):
        StackedReading(list(readings.values()))


@pytest.mark.parametrize(("second", "dim"), [(numbers(4, 30), 0), (numbers(4), 1), (numbers(5, 32), 1)])
def test_tensors_of_other_shapes_do_not_join(second: Tensor, dim: int) -> None:
    readings = stored(p0=numbers(4, 32), p1=second)
    with pytest.raises(CheckpointError, match=f"dimension {dim} only"):
        JoinedReading(list(readings.values()), dim)
