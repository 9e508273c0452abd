"""Command line flags, generated from the fields and docstrings of the configuration, so that none is missing."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias, get_args, get_origin, get_type_hints

from quire.cli.config_file import add_config_option
from quire.cli.structured_options import FLAGS
from quire.config import (
    CacheConfig,
    CudaGraphConfig,
    LoRAConfig,
    ModelConfig,
    MultimodalConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    checks,
    option_sections,
)
from quire.config.hints import OPTION_HINTS
from quire.errors import InvalidParameter, QuireError, UnknownParameter
from quire.sequences.params import SamplingParams

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# Fields whose flags have other names; --seed is the engine's seed.
RENAMED = {
    ("SamplingParams", "seed"): "request_seed",
    ("FailurePolicy", "eject_time_s"): "eject_time",
    ("FailurePolicy", "max_eject_time_s"): "max_eject_time",
    ("FailurePolicy", "retry_min_per_s"): "retry_min_per_second",
    ("FailurePolicy", "first_byte_timeout_s"): "first_byte_timeout",
    ("FailurePolicy", "idle_timeout_s"): "idle_timeout",
}
# Fields in bytes whose names do not end with "_bytes".
SIZES = frozenset({"swap_space"})
# Fields of one or several texts.
SEVERAL = frozenset({"served_model_name"})
# Fields of whole numbers that are not token ids.
COUNTS = frozenset({"cudagraph_capture_sizes", "piecewise_cudagraph_capture_sizes"})
# Other names of flags, from vLLM.
ALIASES = {
    "num_kv_blocks": ("--num-gpu-blocks-override",),
    "tensor_parallel_size": ("-tp",),
    "enable_expert_parallel": ("--expert-parallel",),
    "pipeline_parallel_size": ("-pp",),
    "distributed_timeout_s": ("--distributed-timeout-seconds",),
}
# Prefix of the parsed names of options that only vLLM has, since a command may have an option of the same name.
FOREIGN = "foreign_"
# Short forms of vLLM's flags.
FOREIGN_SHORT = {"data_parallel_size": ("-dp",), "optimization_level": ("-O",)}
GROUPS = {
    ModelConfig: "model",
    CacheConfig: "cache",
    SchedulerConfig: "scheduler",
    SpeculativeConfig: "speculative",
    LoRAConfig: "adapter",
    ParallelConfig: "parallel",
    CudaGraphConfig: "CUDA graph",
    MultimodalConfig: "image",
}


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag and the field that it sets.

    Args:
        field: name of the field.
        dest: name in the parsed arguments; the flag is this name with dashes.
        hint: type of the field, without None.
        is_optional: True if None is a valid value.
        help: description of the field from the docstring, adapted for shells, with the default.
        choices: valid values of the field, if they are fixed.
        nargs: number of values that follow the flag, in argparse's form; None for one.
    """

    field: str
    dest: str
    hint: Any
    is_optional: bool
    help: str
    choices: tuple[str, ...] = ()
    nargs: str | None = None


def add_engine_options(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None, *, has_foreign: bool = True
) -> None:
    """Add the model as the positional argument, and a flag for every other field of the configuration."""
    parser.add_argument(
        "model", nargs="?", default=ModelConfig().model, metavar="MODEL", help=_help_of(ModelConfig)["model"]
    )
    if names is None:
        add_config_option(parser)
    for config, title in GROUPS.items():
        group = parser.add_argument_group(f"{title} options")
        if config is SpeculativeConfig and names is None:
            group.add_argument(
                "--speculative-config",
                type=_json_or_text,
                default=argparse.SUPPRESS,
                metavar="JSON",
                help="these options as one object with vLLM's names (default: none)",
            )
        for flag in _flags(config):
            if flag.field != "model" and (names is None or flag.field in names):
                _add(group, flag)
    if names is None and has_foreign:
        add_foreign_options(parser)


def add_foreign_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of vLLM that do not exist here, hidden in the help; the configuration ignores or refuses them.

    Flags that the parser already has are left out.
    """
    parser.add_argument("--model", dest="model_flag", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    actions = parser._option_string_actions
    for name, (neutral, _) in OPTION_HINTS.items():
        if "--" + name.replace("_", "-") in actions:
            continue
        options: dict[str, Any] = {"dest": FOREIGN + name, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        flags = ["--" + name.replace("_", "-"), *FOREIGN_SHORT.get(name, ())]
        if neutral is not None and {*map(type, neutral)} == {bool}:
            parser.add_argument(*flags, action=argparse.BooleanOptionalAction, **options)
        else:
            parser.add_argument(*flags, type=_json_or_text, **options)


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Add a flag for every sampling parameter."""
    group = parser.add_argument_group("sampling options", "The model's own defaults come before those shown.")
    for flag in _flags(SamplingParams, {"max_tokens": max_tokens}):
        _add(group, flag)


def add_fields(group: argparse._ActionsContainer, cls: type) -> None:
    """Add a flag for every field of a dataclass."""
    for flag in _flags(cls):
        _add(group, flag)


def with_flag(error: QuireError) -> str:
    """Return the message of an error, with the flag in place of a field whose flag has another name."""
    policy = {
        field: "--" + dest.replace("_", "-") for (owner, field), dest in RENAMED.items() if owner == "FailurePolicy"
    }
    flags = {**FLAGS, **policy}
    field = getattr(error, "field", None)
    return str(error).replace(field, flags[field], 1) if field in flags else str(error)


def given_fields(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """Return the given flags of a dataclass, by its fields."""
    return {flag.field: getattr(args, flag.dest) for flag in _flags(cls) if hasattr(args, flag.dest)}


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given flags of the configuration as flat options for `EngineConfig.from_options`."""
    options = {name: value for config in GROUPS for name, value in given_fields(args, config).items()}
    if hasattr(args, "speculative_config"):
        options["speculative_config"] = args.speculative_config
    return options | {name: getattr(args, FOREIGN + name) for name in OPTION_HINTS if hasattr(args, FOREIGN + name)}


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given flags of sampling as arguments of `SamplingParams`."""
    return given_fields(args, SamplingParams)


def sampling_parameters() -> list[str]:
    """Return the names of the sampling parameters that have a flag."""
    return [flag.field for flag in _flags(SamplingParams)]


def read_sampling_parameter(name: str, text: str) -> Any:
    """Parse the value of a sampling parameter, written as after its flag."""
    flag = next((flag for flag in _flags(SamplingParams) if flag.field == name), None)
    if flag is None:
        near = get_close_matches(name, sampling_parameters(), n=1)
        raise UnknownParameter(
            f"there is no sampling parameter {name!r}" + (f"; did you mean {near[0]}?" if near else "")
        )
    if flag.is_optional and text.lower() == "none":
        return None
    if flag.hint == tuple[str, ...]:
        return [text]
    try:
        value = _reader(flag)[0](text) if flag.hint is not bool else {"true": True, "false": False}[text.lower()]
    except (argparse.ArgumentTypeError, KeyError):
        allowed = "true or false" if flag.hint is bool else f"written as {_reader(flag)[1]}"
        raise InvalidParameter(name, text, allowed) from None
    return value


def parse_size(text: str) -> int:
    """Parse a number of bytes, as the configuration does."""
    try:
        return checks.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def refuse_unknown(command: str, unknown: list[str], flags: Collection[str]) -> NoReturn:
    """End the command because of unknown arguments; suggest the nearest flags, or explain flags of vLLM."""
    hints = ""
    for flag in (word.partition("=")[0] for word in unknown if word.startswith("--")):
        name = flag.removeprefix("--").replace("-", "_")
        near = get_close_matches(flag, flags, n=1, cutoff=0.75)
        if name in OPTION_HINTS:
            hints += f"; {flag}: {OPTION_HINTS[name][1]}"
        elif near:
            hints += f"; did you mean {near[0]}?"
    hints = hints or f"; quire {command} --help has the options"
    print(f"quire: error: unrecognized arguments: {' '.join(unknown)}{hints}", file=sys.stderr)
    sys.exit(2)


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def integers(text: str) -> tuple[int, ...]:
    """Parse whole numbers that are separated by commas."""
    return tuple(_integer(part) for part in text.split(","))


def _flags(cls: type, defaults: Mapping[str, Any] = MappingProxyType({})) -> Iterator[Flag]:
    """Yield the flags of a dataclass; `defaults` are shown in place of the fields' defaults."""
    hints, helps = get_type_hints(cls), _help_of(cls)
    for field in fields(cls):
        if field.init and field.metadata.get("has_flag", True):
            choices = get_args(hints[field.name])
            is_optional = type(None) in choices
            hint = choices[0] if is_optional else hints[field.name]
            dest = RENAMED.get((cls.__name__, field.name), field.name)
            allowed = tuple(field.metadata.get("choices", ()))
            shown = _with_default(
                _for_shells(helps.get(field.name, "")), field.name, defaults.get(field.name, _default(field))
            )
            yield Flag(field.name, dest, hint, is_optional, shown, allowed, field.metadata.get("nargs"))


def _add(group: argparse._ActionsContainer, flag: Flag) -> None:
    names = ["--" + flag.dest.replace("_", "-"), *ALIASES.get(flag.dest, ())]
    options: dict[str, Any] = {"dest": flag.dest, "default": argparse.SUPPRESS, "help": flag.help.replace("%", "%%")}
    if flag.hint is bool:
        group.add_argument(*names, action=argparse.BooleanOptionalAction, **options)
    elif flag.field in SEVERAL:
        group.add_argument(*names, nargs="+", metavar="NAME", **options)
    elif flag.hint == tuple[str, ...]:
        action = "append" if flag.nargs is None else "extend"
        group.add_argument(*names, action=action, nargs=flag.nargs, metavar="TEXT", **options)
    else:
        read, metavar = _reader(flag)
        group.add_argument(*names, type=_or_none(read) if flag.is_optional else read, metavar=metavar, **options)


def _reader(flag: Flag) -> tuple[Callable[[str], Any], str]:
    """Return the parser of a flag's value, and the value's name in the help."""
    if flag.field.endswith("_bytes") or flag.field in SIZES:
        return parse_size, "SIZE"
    if flag.hint is int:
        return _integer, "N"
    if flag.hint is float:
        return _number, "X"
    if flag.hint == bool | str:
        return _flag_or_name, "NAME"
    if flag.hint is str or get_origin(flag.hint) is Literal:
        # The choices are only shown: the configuration checks the value, with the same message as in Python.
        choices = flag.choices + (("none",) if flag.is_optional else ())
        return str, "{" + ",".join(choices) + "}" if flag.choices else "FOLDER" if flag.field.endswith(
            "_dir"
        ) else "NAME"
    if flag.hint == tuple[int, ...]:
        return integers, "N,N" if flag.field in COUNTS else "ID,ID"
    if flag.hint == Mapping[int, float]:
        return _bias, "ID=X,ID=X"
    if flag.hint == Mapping[str, Any]:
        return json_object, "JSON"
    if flag.hint == Mapping[str, int]:
        return _counts, "JSON"
    raise TypeError(f"no flag can be made for {flag.field}: {flag.hint}")


def _for_shells(text: str) -> str:
    """Return the description of a field with flags in place of names of fields, and without Python's None."""
    text = re.sub(r"(?<=\. )None (?:takes )?", "By default ", text)
    text = re.sub(r"(?<=; )None for ", '"none" for ', text)
    text = re.sub(r"(?<=; )None (?:takes )?", "by default ", text)
    return re.sub(r"`(\w+)`", lambda name: _flag_name(name[1]), text)


def _flag_name(name: str) -> str:
    """Return the flag of an option or parameter; any other name unchanged."""
    if name == "model":
        return "MODEL"
    names = {*option_sections(), *(item.name for item in fields(SamplingParams))}
    return "--" + name.replace("_", "-") if name in names else name


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _with_default(text: str, name: str, default: Any) -> str:
    """Return the description of a field with its default, unless the description mentions a default."""
    if "default" in text.lower():
        return text
    if isinstance(default, bool):
        words = f"{'on' if default else 'off'} by default"
    elif default is None or default in ((), {}):
        words = "default: none"
    elif name in SIZES or name.endswith("_bytes"):
        words = f"default: {shown_size(default)}"
    else:
        words = f"default: {' '.join(map(repr, default)) if isinstance(default, tuple) else default}"
    return f"{text.removesuffix('.')} ({words})"


def shown_size(num_bytes: int) -> str:
    """Return a number of bytes in the syntax of `parse_size`, with the largest unit that divides it."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{unit}"
    return str(num_bytes)


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() in ("none", "auto") else read(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "None" else text


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


def _counts(text: str) -> dict[str, Any]:
    """Parse numbers by name: a JSON object, or `name=N` with commas between, as in older versions of vLLM."""
    if text.lstrip().startswith("{"):
        return json_object(text)
    pairs = [part.partition("=") for part in text.split(",")]
    return {name.strip(): _integer(number) for name, _, number in pairs}


@cache
def _help_of(cls: type) -> dict[str, str]:
    """Return the lines under `Args:` of a class' docstring, by field."""
    helps: dict[str, str] = {}
    name = ""
    _, _, section = _docstring(cls).partition("Args:\n")
    for line in section.partition("\n\n")[0].splitlines():
        start = re.fullmatch(r"    (\w+): (.*)", line)
        if start is not None:
            name = start[1]
            helps[name] = start[2]
        elif name:
            helps[name] += " " + line.strip()
    return helps


def _docstring(cls: type) -> str:
    """Return a class' docstring, from the source if `python -OO` has removed it."""
    if sys.flags.optimize < 2:
        return inspect.getdoc(cls) or ""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    return ast.get_docstring(definition) or ""
