"""The parser of one output: reasoning and content, independent of the pieces in which the text arrives."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.sequences.thinking import ThinkingPhase


class ReasoningSplit(NamedTuple):
    """Text that a parser has assigned.

    Args:
        reasoning: text of the thinking, without markers.
        content: text of the answer.
    """

    reasoning: str = ""
    content: str = ""


class ReasoningParser(Protocol):
    """Parser of one output. Its joined results do not depend on the division of the text."""

    def push(self, text: str) -> ReasoningSplit:
        """Add text, and return the text that is assigned now."""

    def finish(self) -> ReasoningSplit:
        """Return the remaining text at the end of the output."""


class ReasoningFormat(Protocol):
    """A format of thinking, shared by a family of models."""

    @property
    def name(self) -> str:
        """The format's name in options."""

    @property
    def start(self) -> str:
        """The marker after which thinking begins."""

    @property
    def end(self) -> str:
        """The marker after which thinking has ended."""

    @property
    def close(self) -> str:
        """The text that ends thinking in the middle of a message; it ends with `end`."""

    @property
    def boundaries(self) -> tuple[str, ...]:
        """The tokens after which a new turn begins, in addition to the model's end tokens."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Tokens that must stay in the decoded text, even if the tokenizer calls them special."""

    @property
    def has_headers(self) -> bool:
        """True if answers begin with a marker too."""

    def parser(self, phase: ThinkingPhase) -> ReasoningParser:
        """Return the parser of an output that begins in a phase."""


def begun_length(text: str, *markers: str) -> int:
    """Return the length of the longest proper prefix of a marker with which a text ends."""
    longest = min(len(text), max(map(len, markers)) - 1)
    ends = (length for length in range(longest, 0, -1) if any(marker[:length] == text[-length:] for marker in markers))
    return next(ends, 0)
