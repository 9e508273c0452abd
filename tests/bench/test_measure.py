"""What is measured in this process: every token served, every step's time in a phase, the same tokens with timers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.errors import PromptTooLong
from quire.measurement.bench.measure import EngineBench, step_lines
from quire.measurement.bench.probe import ProbedRates, measure_rates
from quire.measurement.bench.stopwatch import Timed
from quire.measurement.bench.workloads import BenchRequest, Workload, workload
from quire.ops import make_ops
from quire.ops.cpu.native_layers import NativeLayers
from quire.ops.cpu.native_library import find_library
from quire.ops.interface.ops import Ops

OPTIONS = {"num_kv_blocks": 80, "max_model_len": 600, "num_threads": 1, "skip_tokenizer_init": True}
WORK = Workload([BenchRequest([1, 2, 3], 4), BenchRequest([4] * 20, 2)], before=[])
PHASES = ["planning", "building_batch", "layers", "head", "sampling", "advancing", "text_and_outputs"]


def slow_machine(device: str, dtype: torch.dtype, ops: Ops) -> ProbedRates:
    """Say that a machine reads a megabyte in a second, so that reading bounds every step."""
    assert (device, dtype) == ("cpu", torch.bfloat16)
    assert not isinstance(ops, Timed)
    return ProbedRates(1e6, 1e12, 1e15)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "profile"])
def bench(request: pytest.FixtureRequest) -> Iterator[EngineBench]:
    bench = EngineBench(EngineConfig.from_options(**OPTIONS), profile=request.param, probe=slow_machine)
    yield bench
    bench.close()


def test_figures_are_consistent(bench: EngineBench) -> None:
    report = bench.measure(WORK)
    assert (report.num_requests, report.num_prompt_tokens, report.num_new_tokens, report.num_steps) == (2, 23, 6, 4)
    assert math.isclose(report.output_tokens_per_s, 6 / report.wall_s)
    assert math.isclose(report.total_tokens_per_s, 29 / report.wall_s)
    assert 0 < report.time_to_first_token_s["p99"] <= report.wall_s
    assert 0 < report.inter_token_latency_s["p50"] <= report.wall_s
    assert 0 < sum(report.step_time_s.values()) <= report.wall_s
    roofline = report.roofline
    # The bundled model in bfloat16, four times; the caches of both sequences in the steps behind the first.
    assert roofline.weight_bytes == 4 * 2 * 3_475_712
    assert roofline.cache_bytes == 2048 * (3 + 20 + 4 + 5)
    assert math.isclose(roofline.least_s, (roofline.weight_bytes + roofline.cache_bytes) / 1e6)
    assert math.isclose(roofline.share, roofline.least_s / report.wall_s)
    assert roofline.num_read_bound == 4


def test_the_lines_sum_to_the_step(bench: EngineBench) -> None:
    report = bench.measure(WORK)
    assert set(PHASES) <= set(report.step_time_s)
    assert ("linear_layers" in report.step_time_s) == ("attention" in report.step_time_s)
    shares = [float(line.rsplit("%", 1)[0].split()[-1]) for line in step_lines(report)[1:]]
    assert len(shares) == len(report.step_time_s)
    assert sum(shares) == pytest.approx(100, abs=0.05 * len(shares))


def test_only_a_profile_looks_into_the_layers(bench: EngineBench, request: pytest.FixtureRequest) -> None:
    phases = set(bench.measure(WORK).step_time_s) - set(PHASES)
    assert phases == ({"linear_layers", "attention"} if request.node.callspec.id == "profile" else set())


@pytest.mark.skipif(isinstance(find_library(), str), reason="no native kernels were built")
def test_a_profile_runs_every_step_by_its_parts(
    bench: EngineBench, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that run as one call have no parts to time; without timers in the layers, a step's time is theirs."""
    num_rows: list[int] = []
    run = NativeLayers.__call__

    def counted(self: NativeLayers, x: torch.Tensor, *args: Sequence[Any]) -> torch.Tensor | None:
        num_rows.append(len(x))
        return run(self, x, *args)

    monkeypatch.setattr(NativeLayers, "__call__", counted)
    report = bench.measure(Workload([BenchRequest([1, 2, 3], 12)], before=[]))
    assert report.step_time_s["layers"] > 0
    assert bool(num_rows) == (request.node.callspec.id == "plain")


def test_a_prefix_that_was_served_before_is_found(bench: EngineBench) -> None:
    work = workload("W5-warm", 0, range(bench.resolved.vocab_size))
    report = bench.measure(work._replace(requests=[request._replace(num_new=1) for request in work.requests[:2]]))
    assert report.num_cached_tokens == 2 * 512


def test_a_prompt_that_does_not_fit_is_refused_and_leaves_nothing_behind(bench: EngineBench) -> None:
    with pytest.raises(PromptTooLong):
        bench.measure(Workload([BenchRequest([1], 1), BenchRequest([1] * 600, 1)], before=[]))
    assert bench.measure(WORK).num_new_tokens == 6


def test_a_machine_is_measured_with_the_kernels_of_the_engine() -> None:
    found = measure_rates("cpu", torch.float32, make_ops(torch.device("cpu"), "torch"))
    assert min(found) > 1e6
    assert found.rates == (found.read_bytes_per_s, max(found[1:]))
