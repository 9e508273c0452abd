"""`quire simulate`: serves simulated traffic with the real scheduler and memory; only the time of a step is a model."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from quire.cli.early_checks import check_output
from quire.cli.measurement.workload import count
from quire.cli.options import add_engine_options, engine_options, parse_size
from quire.config import ModelConfig
from quire.errors import ConfigError, TraceError, shown
from quire.measurement.simulation.report import NO_LIMITS, ServiceLevel
from quire.measurement.simulation.traffic import TRAFFIC, SyntheticTraffic, TrafficShape, TrafficSource
from quire.platform.bounded.files import reason_of

if TYPE_CHECKING:
    from quire.cli.options import Subparsers
    from quire.measurement.bench.simulated_engine import SimulatedEngine
    from quire.measurement.simulation.hand_over import PrefillSplit
    from quire.measurement.simulation.report import SimulationReport
    from quire.measurement.simulation.study import Scenario, SearchResult

EXIT_NONE_FOUND = EXIT_NONE_SERVED = 1
# The engine's options that a simulation honours.
OPTIONS = (
    "revision",
    "dtype",
    "quantization",
    "max_model_len",
    "block_size",
    "kv_cache_dtype",
    "num_kv_blocks",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "eviction_policy",
    "state_snapshot_interval",
    "watermark",
    "swap_space",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "priority_aging",
    "preemption_policy",
    "preemption_mode",
)
# Options that are fixed by a file of step times.
OPTIONS_OF_MODEL = ("revision", "dtype", "quantization", "max_model_len", "kv_cache_dtype", "gpu_memory_utilization")
HELP_OF_TRAFFIC = {
    "num_requests": "requests, all turns counted; fewer where sessions end at max_context",
    "rate": "requests a second on average, all turns counted",
    "burstiness": "variation of the gaps between arrivals: 1 is a Poisson process, more comes in bursts, 0 is a clock",
    "input_len": "mean tokens of a user's message",
    "input_sigma": "standard deviation of its logarithm; 0 for a constant",
    "output_len": "mean tokens of an answer",
    "output_sigma": "standard deviation of its logarithm; 0 for a constant",
    "turns": "mean turns of a session; their number is geometric",
    "fixed_turns": "give all sessions the same number of turns",
    "think_s": "mean seconds between an answer and the next turn",
    "system_len": "tokens of a system prompt, with which sessions begin",
    "num_systems": "system prompts, the first ones more often",
    "max_context": "most tokens of a prompt and its answer",
}
# Short names in --compare -> names of options.
SHORT = {
    "eviction": "eviction_policy",
    "policy": "scheduling_policy",
    "preemption": "preemption_mode",
    "prefix_caching": "enable_prefix_caching",
}
LENGTHS = ("input_len", "output_len", "system_len")
SWITCH = {"on": True, "off": False}
# Readers of the values in --compare; values of other options are texts.
READERS: Mapping[str, Callable[[str], Any]] = {
    "block_size": int,
    "num_kv_blocks": int,
    "max_num_seqs": int,
    "max_num_batched_tokens": int,
    "priority_aging": int,
    "replicas": int,
    "prefill_replicas": int,
    "watermark": float,
    "swap_space": parse_size,
    "kv_cache_memory_bytes": parse_size,
    "enable_prefix_caching": SWITCH.__getitem__,
}
COMPARED = ("eviction_policy", "scheduling_policy", "preemption_policy", "preemption_mode", "routing", *READERS)
MAX_VARIANTS = 64
SEEDS_OF_COMPARISONS = 5


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate replicas under traffic: latencies, hit rate, capacity and cost, without a GPU",
        description="Serve simulated traffic with the engine's own scheduler and memory. Only the time of a step is a "
        "model: a roofline of named hardware, or one fitted to this machine by python -m quire bench --fit. The exit "
        "code is 1 where --find finds nothing, or no request is served.",
    )
    add_engine_options(parser, OPTIONS)
    machine = parser.add_argument_group("machine options").add_mutually_exclusive_group()
    machine.add_argument(
        "--hardware", "--gpu", metavar="NAME", help="b200, h100, h200, a100, l40s, l4 or cpu (default l4)"
    )
    machine.add_argument("--step-times", metavar="FILE", help="file that quire bench --fit FILE wrote")
    parser.add_argument("--gpus", type=count, default=1, metavar="N", help="machines of a replica (default 1)")
    _add_traffic_options(parser)
    fleet = parser.add_argument_group("fleet options").add_argument
    fleet("--replicas", type=count, default=1, metavar="N", help="replicas (default 1)")
    fleet(
        "--routing", default="round_robin", metavar="NAME", help="round_robin, least_loaded, prefix_aware or kv_events"
    )
    fleet(
        "--prefill-replicas", type=_whole, default=0, metavar="N", help="replicas that compute prompts only (default 0)"
    )
    fleet("--transfer-rate", type=parse_size, metavar="SIZE", help="bytes a second between replicas (default 12.5e9)")
    fleet("--transfer-latency-ms", type=_not_negative, metavar="X", help="milliseconds of a hand-over (default 1)")
    fleet("--slo", metavar="LIMITS", help="time limits, such as ttft=500ms,tpot=50ms; goodput is the share within all")
    fleet("--price", type=_not_negative, default=0.0, metavar="X", help="price of a replica for an hour")
    study = parser.add_argument_group("study options").add_argument
    study("--compare", action="append", default=[], metavar="NAME=A,B", help="simulate each value of an option")
    study("--find", choices=("rate", "replicas"), help="find the largest rate, or the fewest replicas, that keep --slo")
    study(
        "--goodput", type=_share, default=0.95, metavar="X", help="share that must keep --slo for --find (default 0.95)"
    )
    study(
        "--max-replicas", type=count, default=4096, metavar="N", help="most replicas that --find tries (default 4096)"
    )
    study("--seed", type=int, default=0, metavar="N", help="first seed of the traffic (default 0)")
    study("--seeds", type=count, metavar="N", help="seeds; default 1, and 5 with --compare")
    study("--json", action="store_true", help="print one JSON object")
    study("--chart", metavar="FILE", help="write a chart, an SVG file")
    parser.set_defaults(handler=run)


def _add_traffic_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("traffic options")
    group.add_argument("--traffic", metavar="NAME", help=f"{', '.join(TRAFFIC)} (default uniform)")
    group.add_argument("--trace", metavar="FILE", help="requests of a file, one JSON object a line")
    group.add_argument("--hash-block", type=count, metavar="N", help="tokens for each of hash_ids (default 512)")
    group.add_argument(
        "--shorten",
        action="store_true",
        help="cut requests whose --input-len, --output-len and --system-len exceed the context, which are refused "
        "otherwise; those of --traffic and --trace are always cut, and counted",
    )
    group.add_argument("--time-scale", type=_positive, metavar="X", help="factor of the times of --trace (default 1)")
    defaults = TrafficShape()
    for field in fields(TrafficShape):
        name, default = "--" + field.name.replace("_", "-"), getattr(defaults, field.name)
        text = HELP_OF_TRAFFIC[field.name]
        if field.type == "bool":
            group.add_argument(name, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            kind = int if field.type == "int" else float
            text = f"{text} (default {default})"
            group.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        QuireError: an option, a file or a line of the trace is wrong.
    """
    from quire.cli.measurement.simulate_output import comparison_lines, figures_of, found_lines, report_lines

    level = NO_LIMITS if args.slo is None else ServiceLevel.parse(args.slo)
    variants = _variants(args.compare)
    if args.find is not None and (args.compare or args.slo is None):
        why = "cannot be combined with --compare" if args.compare else "needs --slo"
        raise ConfigError(f"--find {args.find} {why}", field="find")
    if not args.prefill_replicas and not any("prefill_replicas" in changes for changes in variants.values()):
        for name in ("transfer_rate", "transfer_latency_ms"):
            if getattr(args, name) is not None:
                raise ConfigError(f"{name} applies with --prefill-replicas only", field=name)
    if args.chart is not None:
        check_output("chart", args.chart)
    engine = _engine(args)
    of_engine: dict[str, Any] = {"engine": engine.name}
    engine_lines = [engine.name]
    if engine.fit is not None:
        of_engine["fit"] = {**engine.fit._asdict(), "is_large": engine.fit.is_large}
        engine_lines += engine.fit.lines()
    first = args.seed
    seeds = range(first, first + (args.seeds or (SEEDS_OF_COMPARISONS if args.compare else 1)))
    shape = None if args.trace else _shape(args, engine)
    if args.find is not None:
        search = _find(args, engine, level, seeds, shape)
        described = {**of_engine, "find": args.find, "goodput": args.goodput}
        if args.json:
            trials = [{"value": trial.value, "goodput": trial.goodput} for trial in search.trials]
            best = None if search.best is None else search.best.value
            print(json.dumps({**described, "best": best, "trials": trials}))
        else:
            print("\n".join([*engine_lines, "", *found_lines(args.find, search, args.goodput)]))
        _draw(args.chart, args.find, {}, search)
        return 0 if search.best is not None else EXIT_NONE_FOUND
    results: dict[str, list[SimulationReport]] = {}
    for name, changes in variants.items():
        results[name] = _scenario(args, engine, level, shape, changes).run_all(seeds)
    if args.json:
        print(json.dumps({**of_engine, "seeds": len(seeds), "variants": figures_of(results)}))
    else:
        lines = (
            comparison_lines(results) if args.compare else report_lines(next(iter(results.values())), level, args.price)
        )
        print("\n".join([*engine_lines, "", *lines]))
    _draw(args.chart, None, results, None)
    is_served = all(any(report.num_requests for report in reports) for reports in results.values())
    return 0 if is_served else EXIT_NONE_SERVED


def _engine(args: argparse.Namespace) -> SimulatedEngine:
    from quire.measurement.bench.simulated_engine import engine_of_step_times, engine_on_hardware

    if args.step_times is None:
        return engine_on_hardware({"model": args.model, **engine_options(args)}, args.hardware or "l4", args.gpus)
    options = engine_options(args)
    fixed = next((name for name in OPTIONS_OF_MODEL if name in options), None)
    fixed = "gpus" if args.gpus != 1 else "model" if args.model != ModelConfig().model else fixed
    if fixed is not None:
        raise ConfigError(f"{fixed} cannot be changed with --step-times: the file says what was measured", field=fixed)
    return engine_of_step_times(args.step_times)


def _shape(args: argparse.Namespace, engine: SimulatedEngine) -> TrafficShape:
    """Return the shape of synthetic traffic."""
    for name in ("hash_block", "time_scale"):
        if getattr(args, name) is not None:
            raise ConfigError(f"{name} applies to --trace only", field=name)
    name = args.traffic or "uniform"
    if name not in TRAFFIC:
        raise ConfigError(f"traffic must be one of {', '.join(TRAFFIC)}, got {shown(name)}", field="traffic")
    given = _given_shape(args)
    chosen: dict[str, Any] = {**TRAFFIC[name], **given}
    if engine.max_model_len is not None:
        if given.get("max_context", 0) > engine.max_model_len:
            raise ConfigError(
                f"max_context must be at most max_model_len ({engine.max_model_len}), got {given['max_context']}",
                field="max_context",
            )
        chosen["max_context"] = min(chosen.get("max_context", TrafficShape().max_context), engine.max_model_len)
    shape = TrafficShape(**chosen)
    longest = shape.system_len + shape.input_len + shape.output_len
    if longest > shape.max_context and not args.shorten and not given.keys().isdisjoint(LENGTHS):
        raise ConfigError(
            f"system_len, input_len and output_len together must be at most the context of {shape.max_context:,} "
            f"tokens, got {longest:,}: give shorter ones, or --shorten to cut the requests",
            field=next(field for field in LENGTHS if field in given),
        )
    return shape


def _given_shape(args: argparse.Namespace) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in fields(TrafficShape) if hasattr(args, field.name)}


def _traffic(
    args: argparse.Namespace, shape: TrafficShape | None, block_size: int, max_context: int | None
) -> Callable[[int], TrafficSource]:
    """Return a function from a seed to the requests; the requests of a trace do not depend on the seed."""
    from quire.measurement.simulation.trace_file import HASH_BLOCK_TOKENS, TraceTraffic

    if shape is not None:
        return lambda seed: SyntheticTraffic(shape, seed)
    shape_fields = _given_shape(args)
    if shape_fields or args.traffic is not None:
        name = next(iter(shape_fields), "traffic")
        raise ConfigError(f"{name} shapes synthetic traffic, not that of --trace", field=name)
    try:
        with open(args.trace, encoding="utf-8") as file:
            trace = TraceTraffic(
                file,
                args.trace,
                hash_block=args.hash_block or HASH_BLOCK_TOKENS,
                block_size=block_size,
                time_scale=args.time_scale or 1.0,
                max_context=max_context,
            )
    except (OSError, ValueError) as error:
        raise TraceError(f"{args.trace} cannot be read: {reason_of(error)}") from error
    return lambda seed: trace  # noqa: ARG005


def _scenario(
    args: argparse.Namespace,
    engine: SimulatedEngine,
    level: ServiceLevel,
    shape: TrafficShape | None,
    changes: Mapping[str, Any],
) -> Scenario:
    from quire.measurement.simulation.study import Scenario

    changed = dict(changes)
    num_replicas, routing = changed.pop("replicas", args.replicas), changed.pop("routing", args.routing)
    num_prefill = changed.pop("prefill_replicas", args.prefill_replicas)
    settings = engine.settings({**engine_options(args), **changed})
    return Scenario(
        settings=settings,
        step_time=engine.step_time,
        traffic=_traffic(args, shape, settings.memory.specs[0].block_size, engine.max_model_len),
        num_replicas=num_replicas,
        routing=routing,
        split=_split(args, num_prefill),
        level=level,
        price_per_hour=args.price,
    )


def _split(args: argparse.Namespace, num_prefill: int) -> PrefillSplit | None:
    """Return the split of prefill and decoding, or None."""
    from quire.measurement.simulation.hand_over import PrefillSplit

    if not num_prefill:
        return None
    transfer: dict[str, float] = {}
    if args.transfer_rate is not None:
        transfer["bytes_per_s"] = args.transfer_rate
    if args.transfer_latency_ms is not None:
        transfer["latency_s"] = args.transfer_latency_ms / 1000
    return PrefillSplit(num_prefill=num_prefill, **transfer)


def _find(
    args: argparse.Namespace, engine: SimulatedEngine, level: ServiceLevel, seeds: range, shape: TrafficShape | None
) -> SearchResult:
    from quire.measurement.simulation.study import find_rate, find_replicas

    if args.find == "replicas" and args.prefill_replicas:
        raise ConfigError("--find replicas cannot be combined with --prefill-replicas", field="find")
    if args.find == "replicas":
        base = _scenario(args, engine, level, shape, {})
        return find_replicas(lambda value: replace(base, num_replicas=value), seeds, args.goodput, args.max_replicas)
    if shape is None:
        raise ConfigError("--find rate needs synthetic traffic: the times of --trace are given", field="find")
    return find_rate(
        lambda rate: _scenario(args, engine, level, replace(shape, rate=rate), {}), shape.rate, seeds, args.goodput
    )


def _variants(compared: list[str]) -> dict[str, dict[str, Any]]:
    """Return the changed options of each variant of --compare by name: all combinations of the values of options."""
    axes: dict[str, dict[str, Any]] = {}
    for text in compared:
        short, sign, values = text.partition("=")
        name = SHORT.get(short, short).replace("-", "_")
        if name not in COMPARED or not sign:
            allowed = ", ".join((*SHORT, *COMPARED))
            raise ConfigError(f"compare must be NAME=A,B with a name of {allowed}, got {shown(text)}", field="compare")
        if name in axes:
            raise ConfigError(f"compare has {short} twice", field="compare")
        axes[name] = {}
        for value in values.split(","):
            try:
                axes[name][f"{short}={value}"] = READERS.get(name, str)(value)
            except (ValueError, KeyError, argparse.ArgumentTypeError) as error:
                allowed = "on or off" if name == "enable_prefix_caching" else f"a value of {name}"
                raise ConfigError(f"compare: {short} must be {allowed}, got {shown(value)}", field="compare") from error
        if len(axes[name]) < 2:
            raise ConfigError(f"compare: {short} must have two values or more, got {shown(values)}", field="compare")
    variants = {
        ", ".join(label for label, _ in chosen): dict(zip(axes, (value for _, value in chosen), strict=True))
        for chosen in product(*(values.items() for values in axes.values()))
    }
    if len(variants) > MAX_VARIANTS:
        raise ConfigError(f"compare must have at most {MAX_VARIANTS} variants, got {len(variants)}", field="compare")
    return variants


def _draw(
    path: str | None, find: str | None, results: Mapping[str, list[SimulationReport]], search: SearchResult | None
) -> None:
    """Write the chart, if `path` is given."""
    if path is None:
        return
    from quire.measurement.simulation.chart import draw_search, draw_variants

    text = draw_variants(results) if search is None else draw_search(find or "", search)
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"chart {path} cannot be written: {error.strerror}", field="chart") from error


def _whole(text: str) -> int:
    return int(_number(text, "of at least 0, and whole", lambda value: value >= 0 and value == int(value)))


def _positive(text: str) -> float:
    return _number(text, "above 0", lambda value: value > 0)


def _not_negative(text: str) -> float:
    return _number(text, "of at least 0", lambda value: value >= 0)


def _share(text: str) -> float:
    return _number(text, "above 0 and at most 1", lambda value: 0 < value <= 1)


def _number(text: str, allowed: str, is_right: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and is_right(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {allowed}")
    return value
