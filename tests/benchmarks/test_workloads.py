"""The benchmarks' workloads and checkpoints: what figures rest on."""

from __future__ import annotations

from math import prod

import pytest

from benchmarks.make_model import SHAPES, shapes
from benchmarks.workloads import NAMES, workload


@pytest.mark.parametrize("name", NAMES)
def test_a_run_can_be_repeated_and_no_other_run_has_its_tokens(name: str) -> None:
    assert workload(name, 1) == workload(name, 1)
    first, second = workload(name, 0).requests, workload(name, 1).requests
    assert [(len(a.prompt), a.num_new) for a in first] == [(len(b.prompt), b.num_new) for b in second]
    # Not even the first block is the same, or a prefix cache would find it.
    assert {tuple(request.prompt[:16]) for request in first}.isdisjoint(tuple(b.prompt[:16]) for b in second)


@pytest.mark.parametrize(
    ("name", "num_requests", "num_prompt", "num_new"),
    [("W1", 1, 32, 128), ("W2", 1, 1024, 1), ("W4", 4, 16384, 256), ("W5-cold", 16, 8704, 512)],
)
def test_workloads_have_the_documented_sizes(name: str, num_requests: int, num_prompt: int, num_new: int) -> None:
    work = workload(name, 0)
    assert (len(work.requests), work.num_prompt, work.num_new) == (num_requests, num_prompt, num_new)


def test_mixed_lengths_stay_in_their_ranges() -> None:
    requests = workload("W3", 0).requests
    assert len(requests) == 16
    assert all(64 <= len(request.prompt) <= 512 and 32 <= request.num_new <= 128 for request in requests)
    assert len({len(request.prompt) for request in requests}) > 8


def test_only_the_warm_run_is_preceded_by_its_prefix() -> None:
    warm, cold = workload("W5-warm", 3), workload("W5-cold", 3)
    prefixes = {tuple(request.prompt[:512]) for request in warm.requests + warm.before}
    assert len(prefixes) == 1
    assert len({tuple(request.prompt[512:]) for request in warm.requests + warm.before}) == 17
    assert cold.before == []


@pytest.mark.parametrize(("shape", "num_parameters"), [("qwen3-0.6b", 596_049_920), ("llama-3.2-1b", 1_235_814_400)])
def test_random_checkpoints_have_the_parameters_of_their_models(shape: str, num_parameters: int) -> None:
    assert sum(prod(sizes) for sizes in shapes(SHAPES[shape]).values()) == num_parameters


def test_every_token_of_a_workload_is_in_every_vocabulary() -> None:
    highest = max(max(request.prompt) for name in NAMES for request in workload(name, 0).requests)
    assert highest < min(config["vocab_size"] for config in SHAPES.values())
