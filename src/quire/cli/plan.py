"""`quire plan`: computes the KV memory of a model and the sequences that fit, from the model's configuration alone."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.cli.options import add_engine_options, engine_options, integers, parse_size
from quire.config import GIB, EngineConfig
from quire.errors import ConfigError, shown

if TYPE_CHECKING:
    from quire.cli.options import Subparsers
    from quire.models.capacity.report import GPUPlan, GroupPlan, MemoryPlan
    from quire.models.capacity.step_memory import ImageMemory

EXIT_DOES_NOT_FIT = 1
# The engine's options that change a size.
OPTIONS = (
    "revision",
    "dtype",
    "device",
    "quantization",
    "max_model_len",
    "block_size",
    "kv_cache_dtype",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "kv_cache_memory_fraction",
    "gpu_memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "speculative_method",
    "num_speculative_tokens",
    "draft_model",
    "mmproj",
    "mm_processor_kwargs",
    "limit_mm_per_prompt",
    "language_model_only",
    "tensor_parallel_size",
    "enable_expert_parallel",
    "enforce_eager",
)
WIDTH = 100
TABLE_MARGIN = "  "
UNITS = ((GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="compute the KV memory of a model, and the sequences that fit, from its config.json alone",
        description="Compute the memory of a model's KV cache, and the sequences that fit, from its config.json alone: "
        "no weights are read. For a GPU, give --gpu, or --device cuda and --memory. The exit code is 1 when one "
        "sequence of max_model_len tokens does not fit.",
    )
    add_engine_options(parser, OPTIONS)
    group = parser.add_argument_group("plan options")
    group.add_argument(
        "--memory",
        type=parse_size,
        metavar="SIZE",
        help="memory of the machine, or with --device cuda of the GPU, weights included",
    )
    group.add_argument(
        "--gpu",
        metavar="NAME",
        help="b200, h100, h200, a100, l40s or l4: --device cuda and --memory with what its driver reports",
    )
    group.add_argument(
        "--weights-bytes",
        type=parse_size,
        metavar="SIZE",
        help="memory of the weights, those of a draft model included; estimated by default",
    )
    group.add_argument(
        "--lengths", type=integers, default=(), metavar="N,N", help="lengths of the sequences in the report"
    )
    group.add_argument("--json", action="store_true", help="print the plan as JSON, sizes in bytes")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    from quire.models.capacity.planner import plan_memory
    from quire.models.capacity.report import PlanRequest

    options, memory_bytes = engine_options(args), args.memory
    if args.gpu is not None:
        memory_bytes = _gpu_bytes(args.gpu, memory_bytes, options.get("device", "cuda"))
        options["device"] = "cuda"
    config = EngineConfig.from_options(**options)
    plan = plan_memory(
        PlanRequest(
            config=config,
            memory_bytes=memory_bytes,
            weights_bytes=args.weights_bytes,
            lengths=args.lengths,
            find_images=_find_images,
        )
    )
    rates = [] if args.gpu is None or plan.draft_architecture else _decode_rates(plan, config, args.gpu)
    if args.json:
        rates_of = {"decode_tokens_per_s": rates} if rates else {}
        print(json.dumps({"fits": plan.fits, **asdict(plan), **rates_of}, indent=2))
    else:
        for line in _lines(plan, rates):
            print(line if line.startswith(TABLE_MARGIN) else textwrap.fill(line, WIDTH))
    return 0 if plan.fits else EXIT_DOES_NOT_FIT


def _find_images(config: EngineConfig, raw: Mapping[str, Any]) -> ImageMemory | None:
    """Return the memory of images of a model with an encoder; other models are planned without torch's import."""
    from quire.engine.startup.image_memory import find_images

    return find_images(config, raw)


def _gpu_bytes(name: str, memory_bytes: int | None, device: str) -> int:
    """Return the memory of a GPU by its name."""
    from quire.measurement.bench.hardware import HARDWARE

    memory_by_gpu = {key: int(hardware.memory_bytes) for key, hardware in HARDWARE.items() if hardware.device == "cuda"}
    if name not in memory_by_gpu:
        raise ConfigError(f"gpu must be one of {', '.join(memory_by_gpu)}, got {shown(name)}", field="gpu")
    if memory_bytes is not None:
        raise ConfigError(
            f"gpu must not be given with memory ({memory_bytes:,}): gpu {name!r} stands for device 'cuda' and memory "
            f"{memory_by_gpu[name]:,}",
            field="gpu",
        )
    if device == "cpu":
        raise ConfigError(f"device must be 'cuda' or 'auto' with gpu {name!r}, got 'cpu'", field="device")
    return memory_by_gpu[name]


def _decode_rates(plan: MemoryPlan, config: EngineConfig, gpu: str) -> list[float | None]:
    """Return the decoding rate for each length, with as many sequences as fit, in tokens/s; None if none fits."""
    from quire.measurement.bench.simulated_engine import roofline_of
    from quire.measurement.simulation.replicas.step_time import StepItem

    step_time = roofline_of(config, gpu, config.parallel.tensor_parallel_size)
    return [
        length.concurrency / step_time.of_step([StepItem(length.num_tokens - 1, 1, 1)] * length.concurrency)
        if length.concurrency
        else None
        for length in plan.lengths
    ]


def _lines(plan: MemoryPlan, rates: Sequence[float | None]) -> Iterator[str]:
    guide = ""
    if plan.draft_architecture:
        name = f" ({plan.draft_model})" if plan.draft_model else ""
        guide = f", with {plan.draft_architecture}{name} to make drafts"
    cache = f"KV cache in {plan.kv_cache_dtype}, blocks of {plan.block_size} tokens"
    yield f"{plan.architecture} ({plan.model}){guide}: {cache}"
    yield from (f"Note: {note}" for note in plan.notes)
    yield ""
    yield from _table(("group", "layers", "a token", "a block", "a sequence", "blocks"), map(_group_row, plan.groups))
    if plan.arena_bytes is not None and len(plan.groups) > 1:
        yield "The groups share one arena; the blocks of each are what it could have by itself."
    if sum(group.bytes_per_token is not None for group in plan.groups) > 1:
        yield f"A token takes {_size(plan.bytes_per_token)} in all groups together."
    if plan.weights_bytes is not None:
        source = "an estimate from parameters and dtype" if plan.is_weights_estimate else "as given or stored"
        part = "" if plan.encoder_bytes is None else f", {_size(plan.encoder_bytes)} of it for the encoder of images"
        yield f"Weights: {_size(plan.weights_bytes)}{part} ({source})."
    if plan.image_bytes is not None:
        yield f"Images: {_size(plan.image_bytes)} set aside for the largest one and for features (mm_processor_kwargs)."
    if plan.gpu is not None:
        yield _gpu_line(plan.gpu)
    if plan.arena_bytes is None:
        yield "Give --memory, --gpu or --kv-cache-memory-bytes to see how many sequences fit."
    else:
        yield f"KV cache: {_size(plan.arena_bytes)} ({plan.arena_bytes:,} bytes), null blocks included."
    yield ""
    rate_texts = ("" if rate is None else f"{rate:,.0f}" for rate in rates or [None] * len(plan.lengths))
    rows = (
        (f"{length.num_tokens:,}", _size(length.sequence_bytes), _count(length.concurrency), rate)
        for length, rate in zip(plan.lengths, rate_texts, strict=True)
    )
    yield from _table(("tokens", "a sequence", "at once", "tokens/s"), rows)
    if rates:
        yield "Tokens/s: of all that run at once, while they decode at that length; by the roofline of quire simulate."
    if plan.never is not None:
        yield plan.never


def _gpu_line(gpu: GPUPlan) -> str:
    parts = f"the largest step takes about {_size(gpu.step_bytes)}"
    if gpu.graph_bytes:
        parts += f", captured steps about {_size(gpu.graph_bytes)}"
    count = gpu.tensor_parallel_size
    which = "GPU" if count == 1 else f"Each of {count} GPUs, one of which is planned here"
    return f"{which}: {_size(gpu.memory_bytes)}, of which {gpu.gpu_memory_utilization:g} may be used; {parts}."


def _group_row(group: GroupPlan) -> tuple[str, ...]:
    sizes = (group.bytes_per_token, group.bytes_per_block, group.bytes_per_sequence)
    shown = ("" if size is None else _size(size) for size in sizes)
    return (
        f"{group.kind}{' (drafts)' if group.is_draft else ''}",
        str(group.num_layers),
        *shown,
        _count(group.num_blocks),
    )


def _table(title: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield rows in columns, the first one left-aligned; empty columns are left out."""
    cells = list(rows)
    used = [idx for idx in range(len(title)) if any(row[idx] for row in cells)]
    widths = {idx: max(len(row[idx]) for row in (title, *cells)) for idx in used}
    for row in (title, *cells):
        first, *others = used
        columns = [f"{row[first]:<{widths[first]}}", *(f"{row[idx]:>{widths[idx]}}" for idx in others)]
        yield TABLE_MARGIN + "   ".join(columns).rstrip()


def _count(count: int | None) -> str:
    return "" if count is None else f"{count:,}"


def _size(num_bytes: int) -> str:
    for unit, name in UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes} B"
