"""Workloads can be repeated, and have the sizes that are written down."""

from __future__ import annotations

import statistics

import pytest

from quire.errors import ConfigError
from quire.measurement.bench.workloads import NAMES, SyntheticWorkload, workload

IDS = range(1000)


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


def test_the_same_numbers_give_the_same_requests() -> None:
    shape = SyntheticWorkload(num_prompts=5, input_len=40, output_len=10, spread=0.5, shared_prefix=8)
    assert shape.requests(IDS) == shape.requests(IDS)
    assert SyntheticWorkload(num_prompts=5).requests(IDS) != SyntheticWorkload(num_prompts=5, workload_seed=1).requests(
        IDS
    )


def test_lengths_stay_within_the_spread_and_prompts_share_their_prefix() -> None:
    many = SyntheticWorkload(num_prompts=50, input_len=40, output_len=10, spread=0.5, shared_prefix=8).requests(IDS)
    assert {len(prompt) for prompt, _ in many} <= set(range(20, 61))
    assert {num_new for _, num_new in many} <= set(range(5, 16))
    assert len({len(prompt) for prompt, _ in many}) > 5
    assert len({tuple(prompt[:8]) for prompt, _ in many}) == 1
    assert len({tuple(prompt) for prompt, _ in many}) == 50


def test_lognormal_lengths_keep_their_average_and_have_a_long_tail() -> None:
    many = SyntheticWorkload(num_prompts=2000, input_len=40, output_len=100, lengths="lognormal", spread=1.0).requests(
        IDS
    )
    outputs = [num_new for _, num_new in many]
    assert statistics.fmean(outputs) == pytest.approx(100, rel=0.1)
    # The median of such a distribution is exp(-1 / 2) of its mean.
    assert statistics.median(outputs) == pytest.approx(61, rel=0.1)
    assert max(outputs) > 500
    assert min(len(prompt) for prompt, _ in many) >= 1


def test_tokens_are_of_the_given_ids() -> None:
    ids = {token for prompt, _ in SyntheticWorkload(num_prompts=9).requests(range(5, 9)) for token in prompt}
    assert ids == {5, 6, 7, 8}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spread": 1.5}, "spread must be a number from 0 to 1 for uniform lengths, got 1.5"),
        ({"spread": float("nan")}, "spread must be a number from 0 to 1 for uniform lengths, got nan"),
        ({"spread": 4.5, "lengths": "lognormal"}, "spread must be a number from 0 to 4 for lognormal lengths, got 4.5"),
        ({"input_len": 8, "shared_prefix": 8}, "shared_prefix must be from 0 to input_len - 1 (7), got 8"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SyntheticWorkload(**options)  # type: ignore[arg-type]
    assert str(caught.value) == words
