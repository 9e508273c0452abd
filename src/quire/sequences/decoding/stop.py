"""Ends of sequences: by a stop token, by length, or by a stop string in the text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy

from quire.sequences.sequence import Sequence
from quire.sequences.status import FinishReason


def end_of_tokens(sequence: Sequence, token_id: int, num_before: int = 0) -> tuple[FinishReason, int | None] | None:
    """Return why a sequence ends when a token is appended to it, or None.

    Args:
        sequence: sequence before any token of the step is appended.
        token_id: token to append; `UNKNOWN`, which is no end token, asks for the length alone.
        num_before: number of tokens of the step that are appended before it.

    Returns:
        The reason and, for one of the request's own stop tokens, that token; None if the sequence continues.
    """
    # Called for every token: the common case reads no attribute of the request.
    num_tokens = len(sequence.tokens) + num_before + 1
    if token_id in sequence.end_ids and num_tokens - sequence.num_prompt > sequence.request.params.min_tokens:
        return FinishReason.STOP, None if token_id in sequence.request.end_token_ids else token_id
    if num_tokens >= sequence.max_tokens:
        return FinishReason.LENGTH, None
    return None


class StopStrings:
    """Search for stop strings in a stream of text, across any boundaries of tokens and chunks.

    The result does not depend on how the text is split: the stop string that is complete first wins, and of several
    that end at the same character the longest.

    Args:
        strings: non-empty stop strings.
        is_included: True to leave the stop string in the text.
    """

    __slots__ = ("_held", "_is_included", "_longest", "_strings")

    def __init__(self, strings: Seq[str], *, is_included: bool) -> None:
        self._strings = tuple(strings)
        self._is_included = is_included
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""

    def push(self, text: str, *, can_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return the text that can be emitted, and the stop string if one is complete.

        A tail that may be the beginning of a stop string is held back until more text decides.

        Args:
            text: new text.
            can_stop: False while fewer than `min_tokens` tokens exist: then the text is emitted, and cannot be part of
                a later match.
        """
        if not self._strings:
            return text, None
        if not can_stop:
            return self.flush() + text, None
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            end, string = match
            self._held = ""
            return text[: end if self._is_included else end - len(string)], string
        num_held = self._ambiguous_tail(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def flush(self) -> str:
        """Return the text that was held back, if the sequence ends for another reason."""
        text, self._held = self._held, ""
        return text

    def fork(self) -> StopStrings:
        """Return an independent copy."""
        return copy(self)

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return the end and the string of the match that is complete first."""
        matches = [(start + len(s), -len(s), s) for s in self._strings if (start := text.find(s)) >= 0]
        if not matches:
            return None
        end, _, string = min(matches)
        return end, string

    def _ambiguous_tail(self, text: str) -> int:
        """Return the length of the longest tail that is the beginning of a stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0
