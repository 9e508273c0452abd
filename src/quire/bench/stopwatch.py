"""Where a step's time goes: a stopwatch that is always in exactly one phase, and timers round the engine's parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.bench.roofline import StepItem
from quire.engine.engine import Engine
from quire.models.decoder import Decoder
from quire.ops.interface import AttentionBatch, Linear, Ops, PagedKV, PagedStates, StateBatch
from quire.scheduling.plan import StepPlan

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


class Stopwatch:
    """Adds up the time spent in each phase; a phase within another is taken from it, so that phases sum to the whole.

    Args:
        clock: seconds.

    Attributes:
        seconds: phase -> what it took so far.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._phase: str | None = None
        self._since = 0.0

    def timed(self, phase: str, call: Callable[..., Any], then: str | None = None) -> Callable[..., Any]:
        """Return `call` so that its time counts for a phase.

        Args:
            phase: that it opens. The head's parts count for the head.
            call: anything.
            then: the phase behind it; None for the one before it.
        """

        def run(*args: Any, **options: Any) -> Any:
            before = self._phase
            if before == HEAD:
                return call(*args, **options)
            self._turn(phase)
            try:
                return call(*args, **options)
            finally:
                self._turn(then or before)

        return run

    def _turn(self, phase: str | None) -> None:
        now = self._clock()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._phase, self._since = phase, now


class Timed:
    """Something of which some methods are replaced.

    Args:
        inner: what it stands for.
        call: what a call of it does, where it can be called.
        methods: by name.
    """

    def __init__(self, inner: Any, call: Callable[..., Any] | None = None, **methods: Callable[..., Any]) -> None:
        self._inner = inner
        self._call = call
        for name, method in methods.items():
            setattr(self, name, method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        assert self._call is not None
        return self._call(*args, **options)


class Observer:
    """Puts timers round the parts of an engine as they are made, and notes what its steps compute.

    Args:
        watch: to be told.
        is_close: whether layers are looked into; that takes a timer for each of their parts.

    Attributes:
        plain_ops, plain_decoder: what was made, without timers.
        steps: the items of each step since the last `reset`.
    """

    plain_ops: Ops
    plain_decoder: Decoder

    def __init__(self, watch: Stopwatch, *, is_close: bool) -> None:
        self.watch = watch
        self._is_close = is_close
        self.steps: list[list[StepItem]] = []

    def reset(self) -> None:
        """Forget what was noted so far."""
        self.watch.seconds.clear()
        self.steps.clear()

    def ops(self, ops: Ops) -> Ops:
        """Return the kernels, with timers where layers are looked into."""
        self.plain_ops = ops
        if not self._is_close:
            return ops
        timed = self.watch.timed

        def pack_linear(*weights: Any, **more: Any) -> Linear:
            linear = ops.pack_linear(*weights, **more)
            return Timed(linear, timed(LINEAR, linear))

        def step_attention(batch: AttentionBatch, kv: PagedKV) -> Any:
            return _all_timed(timed, ATTENTION, ops.step_attention(batch, kv), "prepare", "prepare_queries", "attend")

        def step_states(batch: StateBatch, states: PagedStates) -> Any:
            return _all_timed(timed, RECURRENCE, ops.step_states(batch, states), "convolve", "scan", "correct")

        made: Any = Timed(
            ops,
            pack_linear=pack_linear,
            step_attention=timed(ATTENTION, step_attention),
            step_states=timed(RECURRENCE, step_states),
            fuse_layers=lambda _: None,  # a step that is one call has no parts to time
        )
        return made  # type: ignore[no-any-return]

    def decoder(self, decoder: Decoder) -> Decoder:
        """Return the model with timers; what comes before it in a step builds the batch, what comes behind samples."""
        self.plain_decoder = decoder
        made: Any = Timed(
            decoder, self.watch.timed(LAYERS, decoder, then=SAMPLING), logits=self.watch.timed(HEAD, decoder.logits)
        )
        return made  # type: ignore[no-any-return]

    def engine(self, engine: Engine) -> None:
        """Put timers round scheduler and executor, in place."""
        timed = self.watch.timed
        scheduler, execute = engine.scheduler, timed(BATCH, engine.executor.execute)

        def noting(plan: StepPlan) -> Any:
            self.steps.append(
                [
                    StepItem(item.start, len(item.token_ids), item.num_draft + 1 if item.num_samples else 0)
                    for item in plan.items
                ]
            )
            return execute(plan)

        timed_executor: Any = Timed(engine.executor, execute=noting)
        timed_scheduler: Any = Timed(
            scheduler,
            plan=timed(PLANNING, scheduler.plan),
            update_from_results=timed(ADVANCING, scheduler.update_from_results),
        )
        engine.executor, engine.scheduler = timed_executor, timed_scheduler


def _all_timed(timed: Callable[..., Any], phase: str, part: Any, *names: str) -> Timed:
    return Timed(part, **{name: timed(phase, getattr(part, name)) for name in names})
