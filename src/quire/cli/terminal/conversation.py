"""A conversation with a model, whose answers are printed as they are generated."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.cli.options import read_sampling_parameter, sampling_parameters
from quire.cli.terminal.word_wrap import WordWrap, in_lines
from quire.errors import ConfigError, RequestError
from quire.platform.bounded.files import user_path
from quire.sequences.params import SamplingParams

if TYPE_CHECKING:
    from quire.engine.llm import LLM

# Parameters that a conversation does not support, and their fixed values.
FIXED = {"n": 1, "best_of": None, "beam_width": None, "logprobs": None, "prompt_logprobs": None, "detokenize": True}


class Conversation:
    """One conversation with a model."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.clear()

    def ask(self, question: str) -> None:
        """Answer a question."""
        history = [*self.messages, {"role": "user", "content": question}]
        answer = self._answer(self._llm.render_chat(history))
        self.messages = [*history, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        """Begin a new conversation, with the same instructions."""
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def set_system(self, text: str) -> str:
        """Replace the instructions before the conversation, or remove them for ""; return a message."""
        turns = [message for message in self.messages if message["role"] != "system"]
        self.system = text or None
        self.clear()
        self.messages += turns
        return "There are no instructions now." if self.system is None else f"Instructions: {self.system}"

    def set_parameter(self, text: str) -> str:
        """Set a sampling parameter from a text of name and value; return a message, or all parameters for ""."""
        name, _, value = text.replace("=", " ", 1).partition(" ")
        name = name.removeprefix("--").replace("-", "_")
        if name:
            if name in FIXED:
                raise RequestError(f"{name} has no place in a chat", field=name)
            read = read_sampling_parameter(name, value.strip())
            self.params = replace(self.params, **{name: read})
            return f"{name} is {getattr(self.params, name)!r} from now on."
        parameters = (parameter for parameter in sampling_parameters() if parameter not in FIXED)
        return "  ".join(f"{parameter}={getattr(self.params, parameter)!r}" for parameter in parameters)

    def undo(self) -> str:
        """Forget the last question and its answer; return a message."""
        question = self._take_back()
        return f"Forgotten: {question}"

    def regenerate(self) -> None:
        """Answer the last question once more; with temperature 0 or a seed, the answer is the same."""
        before = self.messages
        question = self._take_back()
        try:
            self.ask(question)
        except BaseException:
            self.messages = before
            raise

    def save(self, path: str) -> str:
        """Write the conversation to a new file, as a JSON object with OpenAI's messages; return a message."""
        if not path:
            raise RequestError("a file is needed: /save FILE")
        try:
            with user_path(path).open("x", encoding="utf-8") as file:
                json.dump({"messages": self.messages}, file, ensure_ascii=False, indent=2)
                file.write("\n")
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error
        return f"Saved {len(self.messages)} messages in {path}."

    def _take_back(self) -> str:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise RequestError("there is no answer yet")
        *self.messages, question, _ = self.messages
        return question["content"]

    def _answer(self, prompt: list[int]) -> str:
        from quire.cli.terminal.live_table import printable

        screen = WordWrap(sys.stdout) if sys.stdout.isatty() else None
        text = ""
        num_tokens = num_cached = 0
        started_s = first_s = time.monotonic()
        with stopped_by_ctrl_c() as is_stopped:
            for delta in self._llm.stream([prompt], self.params):
                for output in delta.outputs:
                    first_s = time.monotonic() if num_tokens == 0 else first_s
                    text += output.text
                    num_tokens += len(output.token_ids)
                    if screen is not None:
                        screen.write(printable(output.text))
                    else:
                        sys.stdout.write(output.text)
                        sys.stdout.flush()
                num_cached = delta.num_cached_tokens
                if delta.error is not None:
                    raise RequestError(delta.error)
                if is_stopped():
                    break
        if screen is None:
            print()
            return text
        screen.end()
        # The step that computes the prompt yields the first token.
        decode_s = time.monotonic() - first_s
        speed = f", {(num_tokens - 1) / decode_s:.1f} tokens/s" if num_tokens > 1 and decode_s > 0 else ""
        print(
            dim(
                f"{num_tokens} tokens{speed}, the first after {first_s - started_s:.3f} s; "
                f"{num_cached} of {len(prompt)} prompt tokens cached"
            )
        )
        return text


def check_chat_parameters(parameters: dict[str, object]) -> None:
    """Refuse sampling parameters that a conversation does not support."""
    for name, value in FIXED.items():
        if parameters.get(name, value) != value:
            raise ConfigError(f"{name} has no place in a chat; leave it out", field=name)


@contextlib.contextmanager
def stopped_by_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C instead of raising it inside a step, which would leave the engine in an inconsistent state."""
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)


def dim(text: str) -> str:
    """Return a text in lines that fit, dimmed on a terminal; unchanged if the output is not a terminal."""
    return f"\x1b[2m{in_lines(text)}\x1b[0m" if sys.stdout.isatty() else text
