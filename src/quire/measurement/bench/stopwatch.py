"""The time of a step by phase: a stopwatch that is in one phase at a time, and timers around parts of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.execution.runners.executor import Executor
from quire.measurement.simulation.replicas.step_time import StepItem
from quire.models.modules.causal_model import CausalModel
from quire.ops.interface.ops import AttentionBatch, Linear, Ops, PagedKV, PagedStates, StateBatch
from quire.scheduling.plan import StepPlan
from quire.scheduling.scheduler import Scheduler

PLANNING, BATCH, LAYERS, LINEAR, ATTENTION, RECURRENCE, HEAD, SAMPLING, ADVANCING, OUTPUT = (
    "planning",
    "building_batch",
    "layers",
    "linear_layers",
    "attention",
    "recurrence",
    "head",
    "sampling",
    "advancing",
    "text_and_outputs",
)
PHASES = (PLANNING, BATCH, LINEAR, ATTENTION, RECURRENCE, LAYERS, HEAD, SAMPLING, ADVANCING, OUTPUT)


def in_order(config: EngineConfig) -> EngineConfig:
    """Return a configuration with synchronous steps, so that the times of steps do not overlap."""
    if config.scheduler.async_scheduling:
        raise ConfigError(
            "async_scheduling must be None or False where steps are timed, got True: their times would overlap",
            field="async_scheduling",
        )
    return replace(config, scheduler=replace(config.scheduler, async_scheduling=False))


class Stopwatch:
    """Sums the time in each phase; an inner phase pauses the outer one, so that the phases sum to the whole."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._phase: str | None = None
        self._since = 0.0

    def timed(self, phase: str, call: Callable[..., Any], then: str | None = None) -> Callable[..., Any]:
        """Return a wrapper of `call` whose time counts for a phase; the phase after it is `then` or the former one."""

        def run(*args: Any, **options: Any) -> Any:
            before = self._phase
            if before == HEAD:
                return call(*args, **options)
            self._switch_to(phase)
            try:
                return call(*args, **options)
            finally:
                self._switch_to(then or before)

        return run

    def _switch_to(self, phase: str | None) -> None:
        now = self._clock()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now


class Timed:
    """A proxy of an object with some methods replaced."""

    def __init__(self, inner: Any, call: Callable[..., Any] | None = None, **methods: Callable[..., Any]) -> None:
        vars(self).update(methods, _inner=inner, _call=call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __call__(self, *args: Any, **options: Any) -> Any:
        assert self._call is not None
        return self._call(*args, **options)


class Observer:
    """Wraps the parts of an engine in timers while they are built, and records the items of its steps."""

    plain_ops: Ops
    plain_decoder: CausalModel

    def __init__(self, watch: Stopwatch, *, is_close: bool) -> None:
        self.watch = watch
        self._is_close = is_close
        self.steps: list[list[StepItem]] = []

    def reset(self) -> None:
        """Clear the times and the items recorded so far."""
        self.watch.seconds.clear()
        self.steps.clear()

    def ops(self, ops: Ops) -> Ops:
        """Return the kernels, with timers if the parts of layers are timed."""
        self.plain_ops = ops
        if not self._is_close:
            return ops
        timed = self.watch.timed

        def pack_linear(*weights: Any, **more: Any) -> Linear:
            linear = ops.pack_linear(*weights, **more)
            return Timed(linear, timed(LINEAR, linear))

        def step_attention(batch: AttentionBatch, kv: PagedKV) -> Any:
            return all_timed(timed, ATTENTION, ops.step_attention(batch, kv), "prepare", "prepare_queries", "attend")

        def step_states(batch: StateBatch, states: PagedStates) -> Any:
            return all_timed(
                timed, RECURRENCE, ops.step_states(batch, states), "short_conv", "gated_delta_net", "mamba2"
            )

        made: Any = Timed(
            ops,
            pack_linear=pack_linear,
            step_attention=timed(ATTENTION, step_attention),
            step_states=timed(RECURRENCE, step_states),
            fuse_layers=lambda _: None,  # the parts of a fused step cannot be timed
            fuse_experts=lambda _: None,
        )
        return made  # type: ignore[no-any-return]

    def decoder(self, decoder: CausalModel) -> CausalModel:
        """Return the model with timers; a step builds the batch before the call of the model, and samples after it."""
        self.plain_decoder = decoder
        made: Any = Timed(
            decoder, self.watch.timed(LAYERS, decoder, then=SAMPLING), logits=self.watch.timed(HEAD, decoder.logits)
        )
        return made  # type: ignore[no-any-return]

    def scheduler(self, scheduler: Scheduler) -> Scheduler:
        """Return the scheduler with timers."""
        timed = self.watch.timed
        made: Any = Timed(
            scheduler,
            plan=timed(PLANNING, scheduler.plan),
            update_from_results=timed(ADVANCING, scheduler.update_from_results),
        )
        return made  # type: ignore[no-any-return]

    def executor(self, executor: Executor) -> Executor:
        """Return the executor with a timer and a recorder of the items of each step."""
        launch = self.watch.timed(BATCH, executor.launch)

        def record_and_launch(plan: StepPlan) -> Any:
            self.steps.append(
                [
                    StepItem(item.start, len(item.token_ids), item.num_draft + 1 if item.num_samples else 0)
                    for item in plan.items
                ]
            )
            return launch(plan)

        made: Any = Timed(executor, launch=record_and_launch)
        return made  # type: ignore[no-any-return]


def all_timed(timed: Callable[..., Any], phase: str, part: Any, *names: str) -> Any:
    """Return a part with timers on some methods; see `Stopwatch.timed`."""
    return Timed(part, **{name: timed(phase, getattr(part, name)) for name in names})
