"""The flags of a synthetic workload, for all commands that generate one."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from quire.measurement.bench.workloads import Lengths, SyntheticWorkload


def add_shape_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every field of `SyntheticWorkload`; a flag that is not given sets no attribute."""
    defaults = SyntheticWorkload()
    group = parser.add_argument_group("workload options")

    def add(name: str, help_text: str, **options: Any) -> None:
        default = getattr(defaults, name[2:].replace("-", "_"))
        group.add_argument(name, default=argparse.SUPPRESS, help=f"{help_text} (default {default})", **options)

    add("--num-prompts", "requests", type=count, metavar="N")
    add("--input-len", "tokens of a prompt, on average", type=count, metavar="N")
    add("--output-len", "tokens to generate, on average", type=count, metavar="N")
    add("--lengths", "how lengths are distributed", choices=get_args(Lengths))
    add("--spread", "lengths vary by this share; lognormal: deviation of the logarithm", type=float, metavar="X")
    add("--shared-prefix", "tokens that all prompts share", type=int, metavar="N")
    add("--workload-seed", "seed of lengths, tokens and arrivals", type=int, metavar="N")


def given_shape(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given flags of a workload's shape as arguments of `SyntheticWorkload`."""
    return {name: getattr(args, name) for name in SyntheticWorkload.__dataclass_fields__ if hasattr(args, name)}


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
