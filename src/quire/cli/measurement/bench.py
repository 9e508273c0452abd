"""`quire bench`: runs a workload offline, and reports its speed and the parts of its time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quire.cli.early_checks import check_output, checked_engine_options
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
        choices=sorted(("W5", *NAMES), key=lambda name: name[:2]),
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
    longest = shape.input_len + shape.output_len if name is None else workload(name, 0).longest
    _check_longest(name, longest, _context_length(options))
    if name == WITHOUT_CACHE and options.setdefault("enable_prefix_caching", False):
        raise ConfigError(f"{name} is the workload without prefix caching", field="enable_prefix_caching")

    from quire.config import EngineConfig
    from quire.measurement.bench.measure import EngineBench, report_lines

    bench = EngineBench(EngineConfig.from_options(**options), profile=args.profile)
    try:
        ids = range(bench.resolved.vocab_size)
        work = Workload(shape.requests(ids), before=[]) if name is None else workload(name, 0, ids)
        _check_longest(name, work.longest, bench.resolved.max_model_len)
        report = bench.measure(work)
    finally:
        bench.close()
    if args.json:
        described = asdict(shape) if name is None else {"name": name}
        print(json.dumps({"model": args.model, "workload": described, "report": asdict(report)}))
    else:
        print("\n".join((*bench.resolved.lines(), "", *report_lines(report))))
    return 0


def _context_length(options: Mapping[str, Any]) -> int:
    """Return the longest context that the options and the model's configuration allow."""
    from quire.config import EngineConfig, context_length
    from quire.models.checkpoints.checkpoint import read_config
    from quire.models.hosted.choice import read_decoder

    model = EngineConfig.from_options(**options).model
    spec = read_decoder(read_config(model.model, model.revision), model.model_impl).spec
    return context_length(model.max_model_len, spec.max_position)


def _check_longest(name: str | None, longest: int, max_model_len: int) -> None:
    """Refuse a workload with a request that the engine would refuse or cut."""
    if longest > max_model_len:
        what = "--input-len and --output-len together" if name is None else f"the longest request of {name}"
        raise ConfigError(
            f"{what} must be at most the context of {max_model_len:,} tokens, got {longest:,}",
            field="input_len" if name is None else "workload",
        )


def _fit(args: argparse.Namespace, shape_fields: dict[str, Any]) -> int:
    """Measure steps, fit their times, and write them to a file."""
    other = next((name for name, value in {"workload": args.workload, "profile": args.profile}.items() if value), None)
    other = other or next(iter(shape_fields), None)
    if other is not None:
        raise ConfigError(
            f"--{other.replace('_', '-')} does not apply to --fit, which has its own requests", field=other
        )
    check_output("fit", args.fit)
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
