"""Short conversations that show how a chat template writes, and the text of the assistant's message in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

# A user's message, after which the assistant's begins.
QUESTION: Final = "kqask?"
ASK: Final[Mapping[str, str]] = {"role": "user", "content": QUESTION}
# Names of the variable with which a template switches thinking on or off.
THINKING_SWITCHES: Final = ("enable_thinking", "thinking")
# Characters with which marks end.
MARK_ENDS: Final = ">]\n"


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
