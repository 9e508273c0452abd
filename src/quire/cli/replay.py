"""`quire replay`: runs a recorded log of memory commands again, and checks every invariant meanwhile."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from quire.cli.options import Subparsers
from quire.errors import LogError
from quire.memory.recording.replay import Report, replay

EXIT_FAULT = 1


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "replay",
        help="run a log of memory commands again",
        description="Run a log that --record-memory wrote again: the same block ids must come out, and every "
        "invariant of memory must hold. The exit code is 1 where one does not.",
    )
    parser.add_argument("log", metavar="LOG", help="the file")
    parser.add_argument(
        "--check-every",
        type=_positive,
        default=1,
        metavar="N",
        help="commands between two checks of all invariants; a check looks at every block",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    try:
        # Invalid UTF-8 is replaced, so that the error names its line.
        with open(args.log, encoding="utf-8", errors="replace", newline="\n") as log:
            report = replay(log, args.check_every)
    except OSError as error:
        raise LogError(f"{args.log} cannot be read: {error.strerror}") from error
    except LogError as error:
        raise LogError(f"{args.log}: {error}") from error
    if args.json:
        print(json.dumps({**asdict(report), "usage": report.usage._asdict()}, indent=2))
    else:
        print(_text(report))
    return EXIT_FAULT if report.fault else 0


def _text(report: Report) -> str:
    usage = report.usage
    verbs = ", ".join(f"{verb} {count:,}" for verb, count in report.num_commands.items())
    lines = [
        f"commands   {sum(report.num_commands.values()):,} ({verbs})",
        f"sequences  {report.num_sequences:,} opened, {usage.num_sequences:,} live at the end",
        f"blocks     {usage.used:,} used, {usage.idle:,} idle, {usage.free:,} free at the end",
        f"events     {usage.num_evictions:,} evictions, {usage.num_copies:,} copies, {usage.num_merges:,} merges, "
        f"{report.hit_tokens:,} hit tokens",
        f"checks     {report.num_checks:,} of all invariants",
    ]
    if report.is_truncated:
        lines.append("cut off    the last line is not whole, and was not run")
    if report.fault:
        lines.append(f"\nFAULT in line {report.fault.line}: {report.fault.detail}")
    else:
        lines.append("\nEvery command gave what was recorded, and every invariant held.")
    return "\n".join(lines)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)
