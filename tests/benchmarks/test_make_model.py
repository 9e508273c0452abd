"""The benchmarks' checkpoints have their models' parameters, and their vocabularies hold every workload."""

from __future__ import annotations

from math import prod

import pytest

from benchmarks.make_model import SHAPES, shapes
from quire.measurement.bench.workloads import NAMES, workload


@pytest.mark.parametrize(("shape", "num_parameters"), [("qwen3-0.6b", 596_049_920), ("llama-3.2-1b", 1_235_814_400)])
def test_random_checkpoints_have_the_parameters_of_their_models(shape: str, num_parameters: int) -> None:
    assert sum(prod(sizes) for sizes in shapes(SHAPES[shape]).values()) == num_parameters


def test_every_token_of_a_workload_is_in_every_vocabulary() -> None:
    highest = max(max(request.prompt) for name in NAMES for request in workload(name, 0).requests)
    assert highest < min(config["vocab_size"] for config in SHAPES.values())
