"""Options in a file: `--config FILE`, TOML or JSON with the names of flags as keys."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, shown
from quire.platform.bounded.files import read_file, reason_of, user_path

MAX_BYTES = 1 << 20
FLAG = "--config"


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add the flag for the help; `with_config_file` reads the file before the arguments are parsed."""
    parser.add_argument(
        FLAG,
        metavar="FILE",
        help="file of options, TOML or JSON, with the names of flags as keys; those of the command line come before it "
        "(default: none)",
    )


def with_config_file(arguments: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments of a command with the options of its file in front."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    finder.add_argument(FLAG)
    if FLAG not in parser._option_string_actions:
        return arguments
    try:
        path = finder.parse_known_args(arguments)[0].config
    except argparse.ArgumentError:  # no file name, which the command's own parser refuses
        return arguments
    if path is None:
        return arguments
    return [*_as_arguments(path, _read(user_path(path)), parser), *arguments]


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = read_file(path, MAX_BYTES).decode()
        options = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"config {path} cannot be read: {reason_of(error)}", field="config") from error
    except ValueError as error:
        hint = "; YAML is not read, write TOML (name = value) or JSON" if path.suffix in (".yaml", ".yml") else ""
        raise ConfigError(f"config {path} is not TOML or JSON: {reason_of(error)}{hint}", field="config") from error
    if not isinstance(options, dict):
        raise ConfigError(f"config {path} must hold an object, got {shown(options)}", field="config")
    return options


def _as_arguments(path: str, options: Mapping[str, Any], parser: argparse.ArgumentParser) -> Iterator[str]:
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        action = parser._option_string_actions.get(flag)
        if action is None or flag == FLAG:
            raise ConfigError(f"config {path} has the unknown option {shown(key)}", field=key)
        if isinstance(value, bool) and action.nargs == 0:
            if value:
                yield flag
            elif isinstance(action, argparse.BooleanOptionalAction):
                yield "--no-" + flag.removeprefix("--")
        elif isinstance(value, list) and action.nargs == "+":
            yield from (flag, *map(_text, value))
        elif isinstance(value, list) and isinstance(action, argparse._AppendAction):
            yield from (f"{flag}={_text(item)}" for item in value)
        else:
            yield f"{flag}={_text(value)}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
