"""Measures the seconds of an engine's steps, in a mix of all kinds that serving has, and fits a model to them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from quire.config import EngineConfig, ResolvedConfig
from quire.engine.engine import Engine
from quire.engine.startup.loading import Wrappers
from quire.engine.startup.start import load
from quire.errors import WorkerError
from quire.execution.runners.executor import Executor
from quire.measurement.bench.simulated_engine import step_times_json
from quire.measurement.bench.stopwatch import Timed, in_order
from quire.measurement.bench.workloads import BenchRequest
from quire.measurement.simulation.replicas.fit import FitQuality, MeasuredStep, fit_step_time
from quire.measurement.simulation.replicas.step_parts import parts_of
from quire.measurement.simulation.replicas.step_time import FittedStepTime, StepItem
from quire.memory.capacity.sizing import arena_bytes
from quire.memory.recording.settings import MemorySettings
from quire.scheduling.plan import StepPlan
from quire.sequences.params import SamplingParams

# Numbers of sequences that decode short contexts; lengths of single prompts; numbers and lengths of long contexts.
DECODING = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
PROMPTS = (16, 48, 96, 160, 256, 384, 512, 1024, 1536)
CONTEXTS = ((2, 1024), (8, 512), (16, 256))
# Numbers of sequences that share a prefix, and lengths of the prefix.
SHARED = ((4, 384), (12, 256), (20, 128), (24, 640))
NUM_MIXED = 40
MIXED_PROMPT, MIXED_NEW = (16, 512), (4, 40)
# Range of the number of steps between two arrivals of the mixed requests.
MIXED_GAP = (0, 6)
# Prefix of the names of requests.
PREFIX = "probe-"
# Options of the engine that are written to the file, as defaults of a simulation.
KEPT = (
    "block_size",
    "enable_prefix_caching",
    "eviction_policy",
    "watermark",
    "swap_space",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "priority_aging",
    "preemption_policy",
    "preemption_mode",
)


class StepProbe:
    """An engine whose steps are recorded with their seconds, including planning and outputs.

    Args:
        config: configuration of the engine.
        clock: function that returns the time in seconds.

    Attributes:
        steps: recorded steps.
    """

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._parts: list[StepItem] = []
        self._engine: Engine = load(in_order(config), wrap=Wrappers(executor=self._recording)).engine
        self._num_requests = 0
        self.steps: list[MeasuredStep] = []

    @property
    def resolved(self) -> ResolvedConfig:
        """The engine's configuration."""
        return self._engine.config

    def measure(self, seed: int = 0) -> None:
        """Serve requests of all kinds and record every step, after a few warm-up steps that are not recorded."""
        rng, num_recorded = random.Random(seed), len(self.steps)
        self._serve([self._request(rng, 8, 4)], rng, (0, 0))
        del self.steps[num_recorded:]
        for requests, gap in self._rounds(rng):
            self._serve(requests, rng, gap)

    def time(self, requests: list[BenchRequest]) -> list[list[float]]:
        """Serve requests that arrive at once, and return the seconds from the start to each of their tokens.

        The steps are not recorded.
        """
        num_recorded, first = len(self.steps), self._num_requests
        times: list[list[float]] = [[] for _ in requests]
        started_s = self._clock()

        def note(name: str, count: int) -> None:
            times[int(name.removeprefix(PREFIX)) - first] += [self._clock() - started_s] * count

        self._serve(requests, random.Random(0), (0, 0), note)
        del self.steps[num_recorded:]
        return times

    def fit(self) -> tuple[FittedStepTime, FitQuality]:
        """Return the model that fits the recorded steps best."""
        return fit_step_time(self.steps)

    def as_json(self, name: str, step_time: FittedStepTime, quality: FitQuality) -> str:
        """Return the content of a file for `quire simulate --step-times`."""
        specs = tuple(group.spec for group in self._engine.scheduler.memory.groups)
        memory = MemorySettings(specs=specs, num_bytes=arena_bytes(specs, self.resolved.num_blocks))
        engine = {field: getattr(self.resolved, field) for field in KEPT}
        return step_times_json(name, step_time, quality._asdict(), engine, memory)

    def close(self) -> None:
        """Release weights and KV memory."""
        self._engine.close()

    def _rounds(self, rng: random.Random) -> Iterator[tuple[list[BenchRequest], tuple[int, int]]]:
        """Yield groups of requests that are served together, with the range of steps between two arrivals."""
        config = self.resolved
        longest = min(config.max_model_len, config.num_blocks * config.block_size // 2) - 16
        at_once = (0, 0)
        for count in DECODING:
            if count <= config.max_num_seqs:
                yield [self._request(rng, rng.randint(8, 40), 10) for _ in range(count)], at_once
        for length in PROMPTS:
            if length <= longest:
                yield [self._request(rng, length, 4)], at_once
        for count, length in CONTEXTS:
            if length <= longest and count * (length + 16) < config.num_blocks * config.block_size:
                yield [self._request(rng, length, 12) for _ in range(min(count, config.max_num_seqs))], at_once
        for count, length in SHARED:
            if length + 64 <= longest and length + 64 * count < config.num_blocks * config.block_size:
                beginning = self._request(rng, length, 1).prompt
                tails = [self._request(rng, rng.randint(8, 40), 12) for _ in range(min(count, config.max_num_seqs))]
                yield [BenchRequest(beginning + tail.prompt, tail.num_new) for tail in tails], at_once
        shortest, most = MIXED_PROMPT
        lengths = [rng.randint(shortest, max(shortest, min(most, longest))) for _ in range(NUM_MIXED)]
        yield [self._request(rng, length, rng.randint(*MIXED_NEW)) for length in lengths], MIXED_GAP

    def _request(self, rng: random.Random, length: int, num_new: int) -> BenchRequest:
        return BenchRequest([rng.randrange(self.resolved.vocab_size) for _ in range(length)], num_new)

    def _serve(
        self,
        requests: list[BenchRequest],
        rng: random.Random,
        gap: tuple[int, int],
        note: Callable[[str, int], None] | None = None,
    ) -> None:
        """Serve requests, each a random number of steps, from the range `gap`, after the previous one."""
        coming, wait = list(reversed(requests)), 0
        while coming or self._engine.has_unfinished:
            while coming and (wait <= 0 or not self._engine.has_unfinished):
                prompt, num_new = coming.pop()
                params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
                self._engine.add_request(f"{PREFIX}{self._num_requests}", {"prompt_token_ids": prompt}, params)
                self._num_requests += 1
                wait = rng.randint(*gap)
            wait -= 1
            started_s = self._clock()
            deltas = self._engine.step()
            seconds = self._clock() - started_s
            error = next((delta.error for delta in deltas if delta.error is not None), None)
            if error is not None:
                raise WorkerError(f"a step of the probe failed: {error}")
            self.steps.append(MeasuredStep(tuple(self._parts), seconds))
            if note is not None:
                for delta in deltas:
                    note(delta.request_id, sum(len(output.token_ids) for output in delta.outputs))

    def _recording(self, executor: Executor) -> Executor:
        """Return a wrapper of the executor that records the parts of each step."""

        def launch(plan: StepPlan) -> Any:
            self._parts = parts_of(plan.items, self._engine.scheduler.memory)
            return executor.launch(plan)

        made: Any = Timed(executor, launch=launch)
        return made  # type: ignore[no-any-return]


def quality_lines(quality: FitQuality, step_time: FittedStepTime) -> list[str]:
    """Return the quality and the coefficients of a fit as lines of text."""
    coefficients = {name: value for name, value in step_time.coefficients.items() if value}
    return [
        *quality.lines(),
        "Microseconds for one of each: "
        + ", ".join(f"{name} {1e6 * value:,.4g}" for name, value in coefficients.items()),
    ]
