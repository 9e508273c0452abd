"""Command line flags, made from the fields and docstrings of the configuration, so that none can be missing."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from quire.config import CacheConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from quire.sequences.params import SamplingParams

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40, "B": 1, "KB": 1000, "MB": 1000**2}
UNITS |= {"GB": 1000**3, "TB": 1000**4}
# The engine's seed has taken the flag --seed.
RENAMED = {("SamplingParams", "seed"): "request_seed"}
# Numbers of bytes whose names do not say so.
SIZES = frozenset({"swap_space"})
GROUPS = {ModelConfig: "model", CacheConfig: "cache", SchedulerConfig: "scheduler", SpeculativeConfig: "speculative"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and the field that it sets.

    Args:
        field: the field's name.
        dest: its name in the parsed arguments; the flag is this with dashes.
        hint: the field's type, without None.
        is_optional: None is a value of its own.
        help: the field's line in the docstring.
    """

    field: str
    dest: str
    hint: Any
    is_optional: bool
    help: str


def add_engine_options(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add the model as the positional argument, and a flag for every other field of the configuration.

    Args:
        parser: of a command.
        names: of the fields, where not all of them mean something to the command.
    """
    parser.add_argument(
        "model", nargs="?", default=ModelConfig().model, metavar="MODEL", help=_help_of(ModelConfig)["model"]
    )
    for config, title in GROUPS.items():
        group = parser.add_argument_group(f"{title} options")
        for flag in _flags(config):
            if flag.field != "model" and (names is None or flag.field in names):
                _add(group, flag)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every sampling parameter."""
    group = parser.add_argument_group("sampling options", "Where a flag is absent, the model's own default holds.")
    for flag in _flags(SamplingParams):
        _add(group, flag)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of the configuration, as the flat options of `EngineConfig.from_options`."""
    return {name: value for config in GROUPS for name, value in _given(args, config).items()}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what was given of the sampling parameters, as the arguments of `SamplingParams`."""
    return _given(args, SamplingParams)


def parse_size(text: str) -> int:
    """Read a number of bytes: `4G` is 4,000,000,000 and `4GiB` is 4,294,967,296."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write bytes, or a number with K, M, G, KiB, MiB, GiB"
        )
    return int(float(match[1]) * UNITS[match[2].upper()])


def integers(text: str) -> tuple[int, ...]:
    """Read whole numbers with commas between them."""
    return tuple(_integer(part) for part in text.split(","))


def _given(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    # Flags that were not given leave no attribute behind.
    return {flag.field: getattr(args, flag.dest) for flag in _flags(cls) if hasattr(args, flag.dest)}


def _flags(cls: type) -> Iterator[Flag]:
    hints, helps = get_type_hints(cls), _help_of(cls)
    for field in fields(cls):
        if field.init and field.metadata.get("has_flag", True):
            choices = get_args(hints[field.name])
            is_optional = type(None) in choices
            hint = choices[0] if is_optional else hints[field.name]
            dest = RENAMED.get((cls.__name__, field.name), field.name)
            yield Flag(field.name, dest, hint, is_optional, helps.get(field.name, ""))


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    name = "--" + flag.dest.replace("_", "-")
    options: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS, "help": flag.help.replace("%", "%%")}
    if flag.hint is bool:
        group.add_argument(name, action=argparse.BooleanOptionalAction, **options)
    elif flag.hint == tuple[str, ...]:
        group.add_argument(name, action="append", metavar="TEXT", **options)
    else:
        read, metavar = _reader(flag)
        group.add_argument(name, type=_or_none(read) if flag.is_optional else read, metavar=metavar, **options)


def _reader(flag: Flag) -> tuple[Callable[[str], Any], str]:
    """Return what reads a flag's value, and what stands for the value in the help."""
    if flag.field.endswith("_bytes") or flag.field in SIZES:
        return parse_size, "SIZE"
    if flag.hint is int:
        return _integer, "N"
    if flag.hint is float:
        return _number, "X"
    if flag.hint == bool | str:
        return _flag_or_name, "NAME"
    if flag.hint is str or get_origin(flag.hint) is Literal:
        return str, "NAME"
    if flag.hint == tuple[int, ...]:
        return integers, "ID,ID"
    if flag.hint == Mapping[int, float]:
        return _bias, "ID=X,ID=X"
    raise TypeError(f"no flag can be made for {flag.field}: {flag.hint}")


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else read(text)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _flag_or_name(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _bias(text: str) -> dict[int, float]:
    pairs = [part.partition("=") for part in text.split(",")]
    return {_integer(token_id): _number(amount) for token_id, _, amount in pairs}


def _help_of(cls: type) -> dict[str, str]:
    """Return the lines under `Args:` of a class' docstring, by field."""
    helps: dict[str, str] = {}
    name = ""
    _, _, section = (inspect.getdoc(cls) or "").partition("Args:\n")
    for line in section.partition("\n\n")[0].splitlines():
        start = re.fullmatch(r"    (\w+): (.*)", line)
        if start is not None:
            name = start[1]
            helps[name] = start[2]
        elif name:
            helps[name] += " " + line.strip()
    return helps
