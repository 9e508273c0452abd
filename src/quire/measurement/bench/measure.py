"""Measurement of a workload in this process: rates, latencies, and the time of each phase of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from quire.config import CACHE_DTYPES, EngineConfig, ResolvedConfig
from quire.engine.engine import Engine
from quire.engine.startup.loading import Wrappers
from quire.engine.startup.start import load
from quire.errors import WorkerError
from quire.measurement.bench.percentiles import latency_lines, percentiles
from quire.measurement.bench.probe import ProbedRates, measure_rates, synchronize
from quire.measurement.bench.roofline import ModelShape, StepWork, least_s, step_work
from quire.measurement.bench.stopwatch import LAYERS, LINEAR, OUTPUT, PHASES, Observer, Stopwatch, in_order
from quire.measurement.bench.workloads import BenchRequest, Workload
from quire.ops.interface.ops import Ops
from quire.sequences.params import SamplingParams

ProbeCall = Callable[[str, torch.dtype, Ops], ProbedRates]

WARM_UP = [BenchRequest([0], 4)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """A lower bound of the time of steps, from the bytes that they read and the operations that they compute.

    Args:
        probe: rates of this machine: the best ones of probes before and after the run.
        weight_bytes, cache_bytes, operations: sums over all steps; see `StepWork`.
        num_read_bound: number of steps whose reads take longer than their operations.
        least_s: lower bound of the time of all steps, in seconds.
        share: `least_s` divided by the time of the run.
    """

    probe: dict[str, float]
    weight_bytes: int
    cache_bytes: int
    operations: int
    num_read_bound: int
    least_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """The results of one run.

    Args:
        wall_s: seconds from the first request sent to the last token received.
        output_tokens_per_s: new tokens of all requests per second of `wall_s`.
        total_tokens_per_s: prompt tokens and new tokens of all requests per second of `wall_s`.
        time_to_first_token_s: percentile -> seconds from the start of the run, including waiting.
        inter_token_latency_s: percentile -> seconds between two tokens of one request.
        step_time_s: phase -> seconds in all steps; the phases do not overlap, and sum to the steps' time.
        roofline: lower bound of the time.
    """

    num_requests: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int
    num_preemptions: int
    num_steps: int
    wall_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    time_to_first_token_s: dict[str, float]
    inter_token_latency_s: dict[str, float]
    step_time_s: dict[str, float]
    roofline: Roofline


class EngineBench:
    """An engine with timers around its parts.

    Args:
        config: configuration of the engine.
        profile: True to time the parts of the layers as well.
        probe: function that measures the rates of this machine; called before and after each run.

    Raises:
        ConfigError: an option or a checkpoint is not supported.
    """

    def __init__(self, config: EngineConfig, *, profile: bool = False, probe: ProbeCall = measure_rates) -> None:
        self._device = torch.device("cpu")
        self._measure_rates = probe
        self._observer = Observer(Stopwatch(self._clock), is_close=profile)
        observer = self._observer
        wrap = Wrappers(observer.ops, observer.decoder, observer.scheduler, observer.executor)
        self._engine: Engine = load(in_order(config), wrap=wrap).engine
        # The clock of a GPU engine waits for the device, so that phases do not overlap.
        self._device = torch.device(self._engine.config.device)
        self._step = self._observer.watch.timed(OUTPUT, self._engine.step)

    @property
    def resolved(self) -> ResolvedConfig:
        """The engine's configuration."""
        return self._engine.config

    def measure(self, workload: Workload) -> BenchReport:
        """Serve the workload once, after a short warm-up.

        Raises:
            RequestError: a prompt does not fit the engine.
            WorkerError: a request failed.
        """
        for requests in (WARM_UP, workload.before):
            self._serve(requests)
        probe = self._probe()
        before = self._engine.stats
        self._observer.reset()
        started = time.perf_counter()
        times, num_cached = self._serve(workload.requests)
        wall_s = time.perf_counter() - started
        stats, seconds = self._engine.stats, dict(self._observer.watch.seconds)
        probe = ProbedRates(*map(max, probe, self._probe()))
        num_prompt, num_new = workload.num_prompt, sum(map(len, times))
        return BenchReport(
            num_requests=len(workload.requests),
            num_prompt_tokens=num_prompt,
            num_cached_tokens=num_cached,
            num_new_tokens=num_new,
            num_preemptions=stats.num_preemptions - before.num_preemptions,
            num_steps=stats.num_steps - before.num_steps,
            wall_s=wall_s,
            output_tokens_per_s=num_new / wall_s,
            total_tokens_per_s=(num_prompt + num_new) / wall_s,
            time_to_first_token_s=percentiles([token_times[0] - started for token_times in times]),
            inter_token_latency_s=percentiles(
                [later - earlier for token_times in times for earlier, later in pairwise(token_times)]
            ),
            step_time_s={phase: seconds[phase] for phase in PHASES if phase in seconds},
            roofline=self._roofline(probe, wall_s),
        )

    def close(self) -> None:
        """Release weights and KV memory."""
        self._engine.close()

    def _serve(self, requests: list[BenchRequest]) -> tuple[list[list[float]], int]:
        """Serve requests that arrive at once, greedily and past the end-of-sequence token."""
        times: dict[str, list[float]] = {}
        cached: dict[str, int] = {}
        try:
            for idx, (prompt, num_new) in enumerate(requests):
                params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
                self._engine.add_request(str(idx), {"prompt_token_ids": prompt}, params)
                times[str(idx)] = []
            while self._engine.has_unfinished:
                for delta in self._step():
                    if delta.error is not None:
                        raise WorkerError(f"request {delta.request_id} failed: {delta.error}")
                    now = time.perf_counter()
                    times[delta.request_id] += [now] * sum(len(output.token_ids) for output in delta.outputs)
                    cached[delta.request_id] = delta.num_cached_tokens
        finally:
            for name in times:
                self._engine.abort_request(name)
        return list(times.values()), sum(cached.values())

    def _probe(self) -> ProbedRates:
        observer = self._observer
        return self._measure_rates(self._device.type, observer.plain_decoder.dtype, observer.plain_ops)

    def _roofline(self, probe: ProbedRates, wall_s: float) -> Roofline:
        decoder, config = self._observer.plain_decoder, self._engine.config
        model = ModelShape.of(
            decoder.spec,
            decoder.weights.shapes(),
            decoder.dtype.itemsize,
            config.quantization,
            CACHE_DTYPES[config.kv_cache_dtype].element_bytes,
        )
        works = [step_work(model, items) for items in self._observer.steps]
        rates, total = probe.rates, StepWork()
        for work in works:
            total = total.plus(work)
        floor_s = sum(least_s(work, rates) for work in works)
        return Roofline(
            probe=probe._asdict(),
            **total._asdict(),
            num_read_bound=sum(least_s(work, rates) > work.operations / rates.operations_per_s for work in works),
            least_s=floor_s,
            share=floor_s / wall_s,
        )

    def _clock(self) -> float:
        synchronize(self._device)
        return time.perf_counter()


def report_lines(report: BenchReport) -> list[str]:
    """Return a report as lines of text."""
    latencies = {
        "Time to first token": report.time_to_first_token_s,
        "Inter-token latency": report.inter_token_latency_s,
    }
    return [
        f"{report.num_requests:,} requests at once: {report.num_prompt_tokens:,} prompt tokens "
        f"({report.num_cached_tokens:,} from the prefix cache), {report.num_new_tokens:,} new tokens",
        f"{report.wall_s:.2f} s in {report.num_steps:,} steps, {report.num_preemptions:,} preemptions",
        f"Output: {report.output_tokens_per_s:,.1f} tokens/s; with prompts: {report.total_tokens_per_s:,.1f} tokens/s",
        *latency_lines(latencies),
        "",
        *step_lines(report),
        "",
        *roofline_lines(report.roofline, report.num_steps),
    ]


def step_lines(report: BenchReport) -> list[str]:
    """Return the lines on the time of each phase."""
    whole_s = sum(report.step_time_s.values())
    if not whole_s:
        return []
    names = {LAYERS: "norms, gates, rest of layers"} if LINEAR in report.step_time_s else {}
    shown = [f"Where the time of a step went, {1e3 * whole_s / report.num_steps:,.2f} ms on average:"]
    for phase, seconds in report.step_time_s.items():
        name = names.get(phase, phase.replace("_", " "))
        shown.append(f"  {name:28} {100 * seconds / whole_s:5.1f}%  {1e3 * seconds / report.num_steps:9,.3f} ms")
    return shown


def roofline_lines(roofline: Roofline, num_steps: int) -> list[str]:
    """Return the lines that compare the steps' time with its lower bound."""
    probe = ProbedRates(**roofline.probe)
    return [
        f"This machine, in short probes before and after the run: reads {_in(probe.read_bytes_per_s)} GB/s; products "
        f"at {_in(probe.float32_operations_per_s)} GFLOP/s in float32 with torch, at "
        f"{_in(probe.own_operations_per_s)} GFLOP/s in the model's dtype with the engine's kernels",
        f"The steps had to read {_in(roofline.weight_bytes)} GB of weights and {_in(roofline.cache_bytes)} GB of "
        f"cache, and to compute {_in(roofline.operations)} GFLOP",
        f"Lower bound by bytes and operations: {roofline.least_s:,.3f} s, {100 * roofline.share:.1f}% of the time that "
        f"was taken; reading bounds {roofline.num_read_bound:,} of {num_steps:,} steps",
    ]


def _in(number: float, unit: float = 1e9) -> str:
    return f"{number / unit:,.3g}" if number < 1000 * unit else f"{number / unit:,.0f}"
