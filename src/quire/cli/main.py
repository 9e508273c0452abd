"""The command `quire`: picks the subcommand, and turns typed errors into one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from quire import __version__
from quire.cli import doctor, generate, inspect, plan, quantize, replay, route, serve
from quire.cli.config_file import with_config_file
from quire.cli.measurement import bench, bench_quality, bench_serve, simulate
from quire.cli.options import refuse_unknown, with_flag
from quire.cli.terminal import chat
from quire.errors import EXIT_USER_ERROR, QuireError

EXIT_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line without the usage, which has thirty lines for `serve`."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USER_ERROR, f"{self.prog}: error: {message}; {self.prog} --help has the options\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command and its subcommands; each subcommand sets `handler`."""
    parser = _Parser(prog="quire", description="Serve large language models from paged memory.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for command in (
        *(generate, chat, serve, route, bench, bench_serve, bench_quality, plan, simulate, inspect, quantize, doctor),
        replay,
    ):
        command.register(subparsers)
    for name, subparser in subparsers.choices.items():
        subparser.usage = _usage(name, subparser)
    return parser


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the usage of a command in one line; argparse would write a line for every three options."""
    words = [
        f"[{action.metavar}]" if action.nargs == "?" else str(action.metavar)
        for action in parser._actions
        if not action.option_strings
    ]
    return " ".join(["quire", name, *words, "[options]"])


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the arguments after `quire`; None takes the process's arguments."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    # A command of two words is joined: with nested subparsers, `bench` would read a model's name as a subcommand.
    if (name := " ".join(arguments[:2])) in (bench_serve.NAME, bench_quality.NAME):
        arguments[:2] = [name]
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    if not arguments[0].startswith("-") and arguments[0] not in commands.choices:
        near = get_close_matches(arguments[0], commands.choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands.choices)}"
        parser.error(f"unknown command {arguments[0]!r}: {hint}")
    if arguments[0] in commands.choices:
        arguments[1:] = with_config_file(arguments[1:], commands.choices[arguments[0]])
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        actions = commands.choices[args.command]._option_string_actions
        flags = [flag for flag, action in actions.items() if action.help is not argparse.SUPPRESS]
        refuse_unknown(args.command, unknown, flags)
    if hasattr(args, "model_flag"):
        args.model = args.model_flag
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments after `quire`; None takes the process's arguments.

    Returns:
        The exit code: 0, 1 if a check failed, 2 for a user's mistake, 130 for Ctrl-C.
    """
    try:
        args = parse_args(argv)
        code: int = args.handler(args)
        sys.stdout.flush()
    except QuireError as error:
        print(f"quire: error: {' '.join(with_flag(error).split())}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe; buffered output must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


if __name__ == "__main__":
    sys.exit(main())
