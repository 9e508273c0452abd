"""The flags of structured outputs."""

from __future__ import annotations

import argparse
from pathlib import Path

from quire.errors import ConfigError
from quire.platform.bounded.files import reason_of
from quire.sequences.structured import StructuredOutputs

# Field of an error -> its flag.
FLAGS = {
    "structured_outputs.json": "--json-schema",
    "structured_outputs.json_object": "--json-object",
    "structured_outputs.regex": "--regex",
    "structured_outputs.choice": "--choice",
    "structured_outputs.grammar": "--grammar",
}


def add_structured_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags; they exclude each other."""
    group = parser.add_argument_group("output options", "Form of the output; without one of them it is free.")
    only = group.add_mutually_exclusive_group()
    only.add_argument("--json-schema", metavar="FILE", help="JSON after the schema in a file")
    only.add_argument("--json-object", action="store_true", help="any JSON object")
    only.add_argument("--regex", metavar="TEXT", help="a text that the regular expression matches as a whole")
    only.add_argument("--choice", action="append", metavar="TEXT", help="one of these; repeat it for each")
    only.add_argument("--grammar", metavar="FILE", help="a text of the Lark grammar in a file")


def structured_options(args: argparse.Namespace) -> dict[str, StructuredOutputs]:
    """Return the given flag as an argument of `SamplingParams`; empty without a flag."""
    if args.json_schema is not None:
        return {"structured_outputs": StructuredOutputs(json=_read("json_schema", args.json_schema))}
    if args.json_object:
        return {"structured_outputs": StructuredOutputs(json_object=True)}
    if args.regex is not None:
        return {"structured_outputs": StructuredOutputs(regex=args.regex)}
    if args.choice is not None:
        return {"structured_outputs": StructuredOutputs(choice=tuple(args.choice))}
    if args.grammar is not None:
        return {"structured_outputs": StructuredOutputs(grammar=_read("grammar", args.grammar))}
    return {}


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name} {path} cannot be read: {reason_of(error)}", field=name) from error
