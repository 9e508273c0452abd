"""`quire bench`: runs a workload offline, and reports its speed and the parts of its time."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.cli.early_checks import checked_engine_options
from quire.cli.measurement.workload import add_shape_options, given_shape
from quire.cli.options import add_engine_options
from quire.errors import ConfigError
from quire.measurement.bench.workloads import NAMES, SyntheticWorkload, Workload, workload

if TYPE_CHECKING:
    from quire.cli.options import Subparsers

WITHOUT_CACHE = "W5-off"


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure speed on a workload, in this process",
        description="Serve prompts of random tokens offline, greedily and past the end-of-sequence token, and report "
        "tokens per second, time to first token, inter-token latency, where the time of a step went, and the share of "
        "what this machine's memory and processor allow. To measure a running server: quire bench serve --help. "
        "No tokenizer is loaded, and no text is generated, without --no-skip-tokenizer-init.",
    )
    parser.add_argument(
        "--workload",
        choices=("W5", *NAMES),
        help="one of the workloads of docs/performance.md, instead of a custom one; W5 is W5-cold",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="time the layers: each step is run part by part, and the timers cost a little speed",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--fit",
        metavar="FILE",
        help="instead of a workload, measure steps of all kinds, fit their times, and write them for quire simulate",
    )
    add_shape_options(parser)
    add_engine_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        QuireError: an option is refused, or the prompts do not fit the engine.
    """
    shape_fields = given_shape(args)
    if args.workload is not None and shape_fields:
        flag = "--" + next(iter(shape_fields)).replace("_", "-")
        raise ConfigError(f"{flag} applies to custom workloads only, not to --workload {args.workload}")
    if args.fit is not None:
        return _fit(args, shape_fields)
    shape = SyntheticWorkload(**shape_fields)
    name = "W5-cold" if args.workload == "W5" else args.workload
    options: dict[str, Any] = {"skip_tokenizer_init": True, **checked_engine_options(args)}
    if name == WITHOUT_CACHE and options.setdefault("enable_prefix_caching", False):
        raise ConfigError(f"{name} is the workload without prefix caching", field="enable_prefix_caching")

    from quire.config import EngineConfig
    from quire.measurement.bench.measure import EngineBench, report_lines

    bench = EngineBench(EngineConfig.from_options(**options), profile=args.profile)
    try:
        ids = range(bench.resolved.vocab_size)
        work = Workload(shape.requests(ids), before=[]) if name is None else workload(name, 0, ids)
        report = bench.measure(work)
    finally:
        bench.close()
    if args.json:
        described = asdict(shape) if name is None else {"name": name}
        print(json.dumps({"model": args.model, "workload": described, "report": asdict(report)}))
    else:
        print("\n".join((*bench.resolved.lines(), "", *report_lines(report))))
    return 0


def _fit(args: argparse.Namespace, shape_fields: dict[str, Any]) -> int:
    """Measure steps, fit their times, and write them to a file."""
    other = next((name for name, value in {"workload": args.workload, "profile": args.profile}.items() if value), None)
    other = other or next(iter(shape_fields), None)
    if other is not None:
        raise ConfigError(
            f"--{other.replace('_', '-')} does not apply to --fit, which has its own requests", field=other
        )
    options: dict[str, Any] = {"skip_tokenizer_init": True, **checked_engine_options(args)}

    from quire.config import EngineConfig
    from quire.measurement.bench.step_probe import StepProbe, quality_lines

    probe = StepProbe(EngineConfig.from_options(**options))
    try:
        probe.measure()
        step_time, quality = probe.fit()
        text = probe.as_json(f"{args.model} on this machine's {probe.resolved.device}, as measured", step_time, quality)
    finally:
        probe.close()
    try:
        with open(args.fit, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"fit {args.fit} cannot be written: {error.strerror}", field="fit") from error
    print(text if args.json else "\n".join(quality_lines(quality, step_time)))
    return 0
