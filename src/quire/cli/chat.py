"""`quire chat`: a conversation on the terminal, or one question a line from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.cli.early_checks import checked_engine_options
from quire.cli.options import add_engine_options, add_sampling_options, sampling_options
from quire.cli.structured_options import add_structured_options, structured_options
from quire.errors import ConfigError, RequestError
from quire.sequences.params import SamplingParams

if TYPE_CHECKING:
    from quire.cli.options import Subparsers
    from quire.engine.llm import LLM

NEW_COMMAND = "/new"
END_COMMANDS = ("/bye", "/exit", "/quit")
HELP = f"{NEW_COMMAND} starts a new conversation, {END_COMMANDS[0]} ends; a line that begins with // is sent with one /"


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model",
        usage="quire chat [MODEL] [options]",
        description="Talk to a model. Ctrl-C stops an answer, Ctrl-D ends, and the line "
        f"{NEW_COMMAND} starts a new conversation. From a pipe, each line is a question.",
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions before the conversation")
    add_engine_options(parser)
    add_sampling_options(parser)
    add_structured_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        QuireError: an option or parameter is refused; with piped input also a refused question.
    """
    given = sampling_options(args) | structured_options(args)
    for name, allowed in (
        ("n", 1),
        ("beam_width", None),
        ("logprobs", None),
        ("prompt_logprobs", None),
        ("detokenize", True),
    ):
        if given.get(name, allowed) != allowed:
            raise ConfigError(f"{name} has no place in a chat; leave it out", field=name)
    SamplingParams(**given)  # validates the parameters before a model is loaded

    options = checked_engine_options(args)
    from quire.engine.llm import LLM

    with contextlib.closing(LLM(**options)) as llm:
        params = replace(llm.get_default_sampling_params(), **{"max_tokens": None, **given})
        conversation = Conversation(llm, params, args.system)
        if sys.stdin.isatty():
            talk(llm, conversation)
        else:
            for line in filter(None, map(str.strip, sys.stdin)):
                conversation.take(line)
    return 0


def talk(llm: LLM, conversation: Conversation) -> None:
    """Read lines from a terminal until its end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() a line editor
    for resolved in llm.resolved.lines():
        print(_dim(resolved))
    print(_dim(f"Ctrl-C stops an answer, Ctrl-D ends, {NEW_COMMAND} starts a new conversation."))
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            continue
        if line in END_COMMANDS:
            return
        if line.startswith("/") and line != NEW_COMMAND and not line.startswith("//"):
            print(HELP if line == "/help" else f"unknown command {line.split()[0]}: {HELP}")
            continue
        try:
            if line:
                conversation.take(line.removeprefix("/") if line.startswith("//") else line)
        except RequestError as error:
            print(f"quire: error: {error} ({NEW_COMMAND} starts a new conversation)", file=sys.stderr)


class Conversation:
    """One conversation with a model, whose answers are printed as they are generated.

    Args:
        llm: engine with a chat model.
        params: sampling parameters of every answer.
        system: instructions before the conversation, or None.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)

    def take(self, line: str) -> None:
        """Answer a question, or start a new conversation.

        Raises:
            RequestError: the conversation is refused, for example as too long; it stays unchanged.
        """
        if line == NEW_COMMAND:
            self.messages = list(self._start)
            return
        history = [*self.messages, {"role": "user", "content": line}]
        answer = self._answer(self._llm.render_chat(history))
        self.messages = [*history, {"role": "assistant", "content": answer}]

    def _answer(self, prompt: list[int]) -> str:
        from quire.cli.live_table import printable

        is_terminal = sys.stdout.isatty()
        text = ""
        num_tokens = num_cached = 0
        with _interrupts() as is_interrupted:
            for delta in self._llm.stream([prompt], self._params):
                for output in delta.outputs:
                    text += output.text
                    num_tokens += len(output.token_ids)
                    sys.stdout.write(printable(output.text) if is_terminal else output.text)
                    sys.stdout.flush()
                num_cached = delta.num_cached_tokens
                if delta.error is not None:
                    raise RequestError(delta.error)
                if is_interrupted():
                    break
        print()
        if is_terminal:
            print(_dim(f"{num_tokens} tokens; {num_cached} of {len(prompt)} prompt tokens cached"))
        return text


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C instead of raising it inside a step, which would leave the engine in an inconsistent state."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text
