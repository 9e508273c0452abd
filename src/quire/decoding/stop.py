"""When a sequence ends: by a token, by its length, or by a stop string in its text."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from copy import copy

from quire.sequences.sequence import Sequence
from quire.sequences.status import FinishReason


def end_of_tokens(sequence: Sequence, token_id: int, num_before: int = 0) -> tuple[FinishReason, int | None] | None:
    """Say whether a sequence ends when a token is appended to it.

    Args:
        sequence: as it is before the token, and before those that are appended with it.
        token_id: the token about to be appended.
        num_before: tokens that are appended with it, before it.

    Returns:
        The reason and, for one of the request's own stop tokens, that token; None when it goes on.
    """
    # Called for every token: most of them need no attribute of the request.
    num_tokens = len(sequence.tokens) + num_before + 1
    if token_id in sequence.end_ids and num_tokens - sequence.num_prompt > sequence.request.params.min_tokens:
        return FinishReason.STOP, None if token_id in sequence.request.end_token_ids else token_id
    if num_tokens >= sequence.max_tokens:
        return FinishReason.LENGTH, None
    return None


class StopStrings:
    """Finds stop strings in a stream of text, across any boundaries of tokens and chunks.

    The result does not depend on how the text is cut: the stop string that is complete first wins, the longest of
    those that end at the same character.

    Args:
        strings: non-empty stop strings.
        is_included: leave the stop string in the text.
    """

    __slots__ = ("_held", "_is_included", "_longest", "_strings")

    def __init__(self, strings: Seq[str], *, is_included: bool) -> None:
        self._strings = tuple(strings)
        self._is_included = is_included
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""

    def push(self, text: str, *, can_stop: bool = True) -> tuple[str, str | None]:
        """Take more text; return what may be shown, and the stop string when one is complete.

        A tail that may become a stop string is held back until that is decided.

        Args:
            text: the new text.
            can_stop: False while fewer than `min_tokens` tokens exist: then the text passes, and cannot be part of
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
        keep = self._ambiguous_tail(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """Return the text held back; for the end of a sequence that ended otherwise."""
        held, self._held = self._held, ""
        return held

    def fork(self) -> StopStrings:
        """Return a copy that goes on by itself."""
        return copy(self)

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return the end and the string of the match that is complete first."""
        found = [(start + len(s), -len(s), s) for s in self._strings if (start := text.find(s)) >= 0]
        if not found:
            return None
        end, _, string = min(found)
        return end, string

    def _ambiguous_tail(self, text: str) -> int:
        """Return the length of the longest tail that begins some stop string."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(string.startswith(tail) for string in self._strings):
                return length
        return 0
