"""Short conversations that show how a chat template writes, and the text of the assistant's message in them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

# A user's message, after which the assistant's begins.
QUESTION: Final = "kqask?"
ASK: Final[Mapping[str, str]] = {"role": "user", "content": QUESTION}
# Names of the variable with which a template switches thinking on or off.
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
# Characters with which marks end.
MARK_ENDS: Final = ">]\n"

FormatT = TypeVar("FormatT")


class Detection(NamedTuple, Generic[FormatT]):
    """The format that a chat template shows, of calls or of thinking.

    Args:
        form: the format; None if the template shows none, or none that is known.
        reason: the way in which the template shows it, or the reason why none is known; the end of a sentence.
    """

    form: FormatT | None
    reason: str


class Detections(Generic[FormatT]):
    """The formats of templates by name, each found once."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[object, dict[str, Detection[FormatT]]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, template: object, name: str, detect: Callable[[], Detection[FormatT]]) -> Detection[FormatT]:
        """Return the format under a name, which `detect` finds; several threads may find it at the same time."""
        with self._lock:
            found = self._found.setdefault(template, {})
        if name not in found:
            found[name] = detect()
        return found[name]


class TemplateTrial(NamedTuple):
    """A conversation that only shows how a template writes.

    Args:
        messages: conversation in the form of `normalise_messages`.
        tools: definitions of functions.
        begins: True if the text ends with the beginning of the assistant's next message.
        thinks: value of the template's switch of thinking; None leaves it out.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    begins: bool = False
    thinks: bool | None = None

    def variables(self) -> dict[str, Any]:
        """Return the variables of the template, except for the messages."""
        switches = {} if self.thinks is None else dict.fromkeys(THINKING_SWITCHES, self.thinks)
        return {**switches, "documents": None, "tools": self.tools, "add_generation_prompt": self.begins}


def call_of(name: str, arguments: Mapping[str, Any], number: int = 0) -> dict[str, Any]:
    """Return a call of an assistant's message, with an id that all templates accept."""
    return {"id": f"kqcall{number:03}", "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_of(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition of a function for a template."""
    return {"type": "function", "function": {"name": name, "description": "kqtool", "parameters": parameters}}


def header_of(prompt: str | None) -> str:
    """Return the text with which a prompt begins the assistant's message; "" if the template refuses the prompt."""
    return "" if prompt is None else prompt.rpartition(QUESTION)[2]


def answer_in(text: str | None, header: str) -> str | None:
    """Return the assistant's message, with the end of its turn; None if the template refuses the conversation."""
    return None if text is None else after(text.rpartition(QUESTION)[2], header)


def after(text: str, before: str) -> str:
    """Return a text without the beginning that it has in common with another one, which ends between marks."""
    length = next((idx for idx, (one, other) in enumerate(zip(text, before, strict=False)) if one != other), None)
    length = min(len(text), len(before)) if length is None else length
    if length < len(before):
        length = max(text.rfind(char, 0, length) for char in MARK_ENDS) + 1
    return text[length:]
