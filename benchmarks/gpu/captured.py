"""Captured steps: time on the device and on the host, compared to eager steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.gpu.memory import BLOCK_SIZE, make_memory, num_blocks_of
from benchmarks.gpu.shapes import Shape, decode_floor
from benchmarks.gpu.timing import Bench
from quire.models.modules.decoder import Decoder
from quire.ops.interface.ops import Ops
from quire.ops.interface.token_draws import DrawsTokens

if TYPE_CHECKING:
    from quire.execution.capture.captured_steps import CapturedSteps, CaptureOptions
    from quire.execution.step.batch import BatchBuilder

# Number of steps whose host time is measured, after as many warm-up steps.
STEPS = 30


class Captured(NamedTuple):
    """A captured decode step with everything that runs it.

    Args:
        run: runs the step, and returns its logits.
        items: items of the step.
        batch: number of sequences.
        context: tokens of each.
        error: largest difference of its logits from those of the step as it is launched without a capture.
    """

    run: Callable[[], torch.Tensor]
    items: list[Any]
    batch: int
    context: int
    error: float


def measure_captured(bench: Bench, decoder: Decoder, shape: Shape, batch: int, context: int) -> None:
    """Measure a captured step of decodes; a failure is recorded as a figure, and does not end the run."""
    name = f"{shape.name}, captured decode, {batch} x {context}"
    try:
        captured = capture(bench, decoder, shape, batch, context)
        seconds = bench.seconds(lambda _idx: captured.run())
        host_s = host_seconds(bench, captured.run)
        bench.add(
            name,
            ms=seconds * 1e3,
            host_ms=host_s * 1e3,
            tokens_per_s=batch / seconds,
            share=decode_floor(shape, batch, context, bench.rates) / seconds,
            error=captured.error,
        )
        for kind, options in (("greedy", {"temperature": 0.0}), ("top_p", {"temperature": 0.8, "top_p": 0.95})):
            measure_sampler(bench, decoder.ops, captured, shape, kind, options)
    except Exception as error:  # a graph that fails is a result
        bench.add(name, failed=f"{type(error).__name__}: {error}")


def capture(bench: Bench, decoder: Decoder, shape: Shape, batch: int, context: int) -> Captured:
    """Capture a step, and write one whose sequences share no blocks."""
    from quire.execution.capture.captured_steps import CaptureOptions, capture_steps
    from quire.execution.step.batch import BatchBuilder

    spans = [(context - 1, 1)] * batch
    num_blocks = num_blocks_of(spans)
    memory = make_memory(num_blocks, shape.num_layers, shape.num_kv_heads, shape.head_dim, bench.device)
    options = CaptureOptions((batch,), context)
    captured = capture_steps(decoder, [memory], [num_blocks], BLOCK_SIZE, options)  # type: ignore[list-item]
    ladder = None if captured is None else captured.ladder
    if ladder is None:
        raise RuntimeError("the step could not be captured")
    builder = BatchBuilder(BLOCK_SIZE, bench.device, [group.cache for group in decoder.cache_groups])
    items = open_items(builder, spans, num_blocks)
    laid = builder.lay_out(items)
    expected = decoder.logits(decoder(laid.input_ids, laid.positions, laid.groups, [memory]))
    error = float((ladder.run(items, builder).outputs - expected).abs().max())
    return Captured(lambda: ladder.run(items, builder).outputs, items, batch, context, error)


def open_items(builder: Any, spans: Sequence[tuple[int, int]], num_blocks: int) -> list[Any]:
    """Open sequences of some history and rows in a builder of batches, in scattered blocks; return their items."""
    from quire.memory.results import NO_OPS, TableDelta
    from quire.scheduling.plan import NewSequence, ScheduledSequence, StepPlan
    from quire.sequences.params import SamplingParams

    order = iter((1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1))).tolist())
    params, items = SamplingParams(temperature=0.0), []
    for seq_id, (history, num_rows) in enumerate(spans):
        deltas = (TableDelta(0, 0, tuple(islice(order, -(-(history + num_rows) // BLOCK_SIZE)))),)
        new = NewSequence(params, seq_id, 0, 1, (5,), ())
        items.append(ScheduledSequence(seq_id, history, (5,) * num_rows, deltas, 1, new))
    builder.apply_plan(StepPlan(0, tuple(items), NO_OPS, ()))
    return [item._replace(new_sequence=None, table_deltas=()) for item in items]


def measure_pieces(bench: Bench, decoder: Decoder, shape: Shape, decodes: int, context: int, prompt: int) -> None:
    """Measure a step of decodes and a prompt, run eagerly and captured in pieces between attention.

    Both lay out the step and plan its attention; output heads are left out.
    """
    from quire.execution.capture.captured_steps import CaptureOptions

    name = f"{shape.name}, {decodes} x {context} and a prompt of {prompt}"
    spans = [(context - 1, 1)] * decodes + [(0, prompt)]
    options = CaptureOptions((), context + prompt, (decodes + prompt,))

    def replay(captured: CapturedSteps, items: list[Any], builder: BatchBuilder) -> torch.Tensor:
        assert captured.pieces is not None
        return captured.pieces.run(builder.lay_out(items))

    measure_both(bench, decoder, shape, name, spans, options, replay)


def measure_drafts(bench: Bench, decoder: Decoder, shape: Shape, batch: int, context: int, num_drafts: int) -> None:
    """Measure a step that verifies drafts, run eagerly and captured, where each draft is a row.

    Both lay out the step and plan its attention; only the captured one has the output head.
    """
    from quire.execution.capture.captured_steps import CaptureOptions
    from quire.execution.capture.decode_rows import few_rows_of

    name = f"{shape.name}, {batch} x {context} with {num_drafts} drafts"
    spans = [(context - 1 - num_drafts, 1 + num_drafts)] * batch
    options = CaptureOptions((batch * (1 + num_drafts),), context)

    def replay(captured: CapturedSteps, items: list[Any], builder: BatchBuilder) -> torch.Tensor:
        found = few_rows_of(items)
        assert captured.ladder is not None
        assert found is not None
        return captured.ladder.run(found[0], builder, None, found[1]).hidden

    measure_both(bench, decoder, shape, name, spans, options, replay)


def measure_both(
    bench: Bench,
    decoder: Decoder,
    shape: Shape,
    name: str,
    spans: Sequence[tuple[int, int]],
    options: CaptureOptions,
    replay: Callable[[CapturedSteps, list[Any], BatchBuilder], torch.Tensor],
) -> None:
    """Measure a step, run eagerly and captured; a failure is recorded as a figure."""
    from quire.execution.capture.captured_steps import capture_steps
    from quire.execution.step.batch import BatchBuilder

    num_blocks = num_blocks_of(spans)
    if num_blocks * BLOCK_SIZE * shape.kv_bytes > bench.memory_left():
        return
    memory = make_memory(num_blocks, shape.num_layers, shape.num_kv_heads, shape.head_dim, bench.device)
    builder = BatchBuilder(BLOCK_SIZE, bench.device, [group.cache for group in decoder.cache_groups])
    items = open_items(builder, spans, num_blocks)

    def launched() -> torch.Tensor:
        batch = builder.lay_out(items)
        return decoder(batch.input_ids, batch.positions, batch.groups, [memory])

    def measure(kind: str, run: Callable[[], torch.Tensor]) -> None:
        seconds = bench.seconds(lambda _idx: run(), repeats=5)
        error = float((run() - launched()).abs().max())
        bench.add(f"{name}, {kind}", ms=seconds * 1e3, host_ms=host_seconds(bench, run) * 1e3, error=error)

    try:
        captured = capture_steps(decoder, [memory], [num_blocks], BLOCK_SIZE, options)  # type: ignore[list-item]
        if captured is None:
            raise RuntimeError("the step could not be captured")
        measure("launched", launched)
        measure("captured", lambda: replay(captured, items, builder))
    except Exception as error:  # a graph that fails is a result
        bench.add(name, failed=f"{type(error).__name__}: {error}")


def host_seconds(bench: Bench, run: Callable[[], object]) -> float:
    """Return the median host time of a call, made while the device is idle."""
    times = []
    for _ in range(1 if bench.is_rehearsal else 2 * STEPS):
        if not bench.is_rehearsal:
            torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return sorted(times[len(times) // 2 :])[len(times) // 4]


def measure_sampler(
    bench: Bench, ops: Ops, captured: Captured, shape: Shape, kind: str, options: dict[str, Any]
) -> None:
    """Measure the sampling of a step's tokens from logits, copies to the host included."""
    name = f"{shape.name}, {kind} tokens of {captured.batch}"
    try:
        from quire.execution.sampling.device.device_draws import TorchDraws
        from quire.execution.sampling.sampler import Sampler
    except ImportError as error:
        return bench.add(name, skipped=f"needs all that Quire depends on: {error}")
    from quire.memory.results import NO_OPS
    from quire.scheduling.plan import NewSequence, StepPlan
    from quire.sequences.params import SamplingParams

    draws = ops if isinstance(ops, DrawsTokens) else TorchDraws()
    sampler, params = Sampler(bench.device, draws=draws), SamplingParams(**options)
    opened = [item._replace(new_sequence=NewSequence(params, item.seq_id, 0, 1, (5,), ())) for item in captured.items]
    sampler.begin_step(StepPlan(0, tuple(opened), NO_OPS, ()))
    logits = torch.randn(captured.batch, shape.vocab_size, device=bench.device)
    copy = torch.empty_like(logits)

    def sample() -> None:
        copy.copy_(logits)
        sampler.sample(copy, captured.items)

    return bench.add(name, ms=host_seconds(bench, sample) * 1e3)
