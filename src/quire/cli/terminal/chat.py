"""`quire chat`: a conversation on the terminal, or from a pipe with one question per line."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from quire.cli.early_checks import checked_engine_options
from quire.cli.options import add_engine_options, add_sampling_options, sampling_options
from quire.cli.structured_options import add_structured_options, structured_options
from quire.cli.terminal.conversation import Conversation, check_chat_parameters, dim
from quire.cli.terminal.word_wrap import in_lines
from quire.errors import ConfigError, RequestError
from quire.sequences.params import SamplingParams

if TYPE_CHECKING:
    from quire.cli.options import Subparsers
    from quire.engine.llm import LLM

QUOTES = '"""'
END: Final = ("bye", "exit", "quit")
HELP: Final = f"""\
/help                 shows this list
/system TEXT          sets the instructions before the conversation; without a text, removes them
/set NAME VALUE       sets a sampling parameter, such as temperature; without a name, shows all
/regen                answers the last question once more
/undo                 forgets the last question and its answer
/clear                begins a new conversation; /new is the same
/save FILE            writes the conversation to a new file, as JSON
/bye                  ends; so do /exit, /quit and Ctrl-D
{QUOTES}                   begins and ends a question of several lines
//TEXT                sends a text that begins with one /
Ctrl-C                stops an answer"""


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model",
        description="Talk to a model. Ctrl-C stops an answer, Ctrl-D ends, and the line /help lists the commands. "
        "From a pipe, each line is a question or a command.",
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation (default: none)")
    add_engine_options(parser)
    add_sampling_options(parser, None)
    add_structured_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        QuireError: an option or parameter is refused; with piped input also a refused question or command.
    """
    overrides = sampling_options(args) | structured_options(args)
    check_chat_parameters(overrides)
    SamplingParams(**overrides)  # validates the parameters before a model is loaded

    options = checked_engine_options(args)
    from quire.engine.llm import LLM

    with contextlib.closing(LLM(**options)) as llm:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ConfigError(
                f"model {llm.model_name!r} has no chat template, which a conversation needs: give --chat-template "
                "FILE, or complete a text with quire generate",
                field="chat_template",
            )
        params = replace(llm.get_default_sampling_params(), **{"max_tokens": None, **overrides})
        conversation = Conversation(llm, params, args.system)
        if sys.stdin.isatty():
            talk(llm, conversation)
            return 0
        lines = filter(None, map(str.strip, sys.stdin))
        for line in lines:
            if not handle(conversation, _with_further_lines(line, lambda: next(lines))):
                break
    return 0


def talk(llm: LLM, conversation: Conversation) -> None:
    """Read lines from the terminal until end of input or a command that ends the conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line editor
    print(dim(f"{llm.model_name}, contexts of {llm.resolved.max_model_len:,} tokens. /help lists the commands."))
    for notice in llm.resolved.notices():
        print(dim(notice))
    while True:
        try:
            line = _with_further_lines(input("\n> ").strip(), lambda: input(". "))
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        try:
            if line and not handle(conversation, line):
                return
        except RequestError as error:
            print(in_lines(f"quire: error: {error}"), file=sys.stderr)


def handle(conversation: Conversation, line: str) -> bool:
    """Run a command or answer a question; return False if the command ends the conversation."""
    if not line.startswith("/") or line.startswith("//"):
        conversation.ask(line.removeprefix("/") if line.startswith("//") else line)
        return True
    name, _, text = line.removeprefix("/").partition(" ")
    if name in END:
        return False
    commands: dict[str, Callable[[str], str | None]] = {
        "help": lambda _: HELP,
        "system": conversation.set_system,
        "set": conversation.set_parameter,
        "regen": lambda _: conversation.regenerate(),
        "undo": lambda _: conversation.undo(),
        "clear": lambda _: conversation.clear(),
        "new": lambda _: conversation.clear(),
        "save": conversation.save,
    }
    if name not in commands:
        near = get_close_matches(name, [*commands, *END], n=1)
        hint = f"did you mean /{near[0]}? " if near else ""
        names = ", ".join(f"/{command}" for command in [*commands, *END])
        raise RequestError(f"unknown command /{name}: {hint}There are {names}; // sends a text that begins with /")
    said = commands[name](text.strip())
    if said is not None:
        print(dim(said))
    return True


def _with_further_lines(line: str, read: Callable[[], str]) -> str:
    """Return a line; after three quotes, read further lines up to the next three quotes."""
    if not line.startswith(QUOTES):
        return line
    text = line.removeprefix(QUOTES)
    while QUOTES not in text:
        try:
            text += "\n" + read()
        except StopIteration:
            break
    return text.partition(QUOTES)[0].strip()
