"""Reads one output as it comes: content and calls, whatever the pieces in which the text arrives."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from quire.text.tool_calls.calls import JSON_SPACE, CallDelta, Piece, merge
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.incoming import Incoming, Reading


class ToolFormat(Protocol):
    """How models of one kind write calls."""

    @property
    def name(self) -> str:
        """How users call the format."""
        ...

    @property
    def marker(self) -> str:
        """What calls begin with."""
        ...

    @property
    def other_markers(self) -> tuple[str, ...]:
        """What else a tokenizer may have a token of its own for."""
        ...

    @property
    def may_be_bare(self) -> bool:
        """True where an output may begin with calls without a marker."""
        ...

    @property
    def id_chars(self) -> int | None:
        """How long ids of calls must be, of letters and digits, where templates insist; None where they do not."""
        ...

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read the calls behind a marker, or at the beginning; return where they end, None where there are none."""
        ...

    def grammar(self, rules: CallRules) -> str:
        """Return the Lark grammar of outputs in which every call is well formed."""
        ...


class CallReader:
    """What the readings of one output share.

    Args:
        names: of the functions that there are; what calls another one is content.
        is_forced: the output keeps to the format's grammar, so a call that has begun is one, and is told as it comes.
            Otherwise it is told when it is whole.
    """

    def __init__(self, names: frozenset[str], *, is_forced: bool) -> None:
        self.names = names
        self.is_forced = is_forced
        self.num_calls = 0

    def tell(self, name: str, arguments: str) -> CallDelta:
        """Return a whole call."""
        self.num_calls += 1
        return CallDelta(self.num_calls - 1, name, arguments, is_last=True)


class CallParser:
    """Gives the content and the calls of one output, piece by piece.

    The pieces, merged, do not depend on how the text was cut. White space before a call is left out, and so is what
    lies between calls or ends the output behind one. Whatever only looks like a call is content.

    Args:
        form: the format.
        names: of the functions that there are.
        is_forced: see `CallReader`.
    """

    def __init__(self, form: ToolFormat, names: frozenset[str], *, is_forced: bool) -> None:
        self._incoming = Incoming()
        self._reader = CallReader(names, is_forced=is_forced)
        self._pieces = _read(form, self._incoming, self._reader)
        self._is_inside_call = False

    def push(self, text: str) -> list[Piece]:
        """Take more text and return what it makes certain."""
        if not text:
            return []
        self._incoming.text += text
        return self._take()

    def finish(self) -> list[Piece]:
        """Return the rest; the output has ended."""
        self._incoming.is_ended = True
        return self._take()

    @property
    def num_calls(self) -> int:
        """How many calls have been told, one that is not complete included."""
        return self._reader.num_calls

    @property
    def is_inside_call(self) -> bool:
        """True while the last call that was told is not complete."""
        return self._is_inside_call

    def _take(self) -> list[Piece]:
        pieces = []
        for piece in self._pieces:
            if piece is None:
                break
            pieces.append(piece)
            if isinstance(piece, CallDelta):
                self._is_inside_call = not piece.is_last
        return merge(pieces)


def _read(form: ToolFormat, incoming: Incoming, reader: CallReader) -> Generator[Piece | None]:
    """Yield what an output holds, None where more text is needed."""
    end = (yield from form.read_calls(incoming, 0, reader)) if form.may_be_bare else None
    if end is not None:
        incoming.consume(end)
    follows_call = end is not None
    while True:
        begin = yield from _content(incoming, form.marker, follows_call=follows_call)
        if begin is None:
            return
        end = yield from form.read_calls(incoming, begin + len(form.marker), reader)
        if end is None:
            yield incoming.consume(begin + len(form.marker))
        else:
            incoming.consume(end)
        follows_call = end is not None


def _content(incoming: Incoming, marker: str, *, follows_call: bool) -> Generator[Piece | None, None, int | None]:
    """Yield content up to a marker, but for the white space before it, or up to the end.

    Args:
        incoming: the text; what is returned is a place in it.
        marker: what ends content.
        follows_call: white space alone is no content.

    Returns:
        Where the marker begins, None where the text ends before.
    """
    while True:
        text = incoming.text
        begin = text.find(marker)
        sure = text[:begin] if begin >= 0 else text[: len(text) - _begun(text, marker)]
        if content := incoming.consume(len(sure.rstrip(JSON_SPACE))):
            follows_call = False
            yield content
        if begin >= 0:
            return begin - len(content)
        if incoming.is_ended:
            rest = incoming.consume(len(incoming.text))
            if rest.strip(JSON_SPACE) or not follows_call:
                yield rest
            return None
        yield None


def _begun(text: str, marker: str) -> int:
    """Return how much of a marker, if any, the text ends with."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
