"""The incremental parser of one output: content and calls, independent of the pieces in which the text arrives."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Protocol

from quire.text.tool_calls.calls import JSON_SPACE, CallDelta, Function, Piece, merge
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.incoming import Incoming, Reading


class ToolFormat(Protocol):
    """A format of tool calls, shared by a family of models."""

    @property
    def name(self) -> str:
        """The format's name in options."""

    @property
    def marker(self) -> str:
        """The marker that begins calls."""

    @property
    def other_markers(self) -> tuple[str, ...]:
        """Further texts of the format for which a tokenizer may have single tokens."""

    @property
    def may_be_bare(self) -> bool:
        """True if an output may begin with calls without a marker."""

    @property
    def content_begin(self) -> str:
        """The text before the content of an output that does not begin with calls; "" if there is none."""

    @property
    def id_chars(self) -> int | None:
        """The length of call ids (letters and digits) that templates require; None for any length."""

    @property
    def counted_id(self) -> str:
        """The form of call ids with `{name}` and `{number}` of the call; "" if ids are random."""

    @property
    def answer_head(self) -> str:
        """The rules before a structured answer, if the grammar covers the whole output, including the reasoning; ""
        if it begins after the reasoning."""

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read the calls after a marker, or at the beginning; return their end, or None if there are none."""

    def grammar(self, rules: CallRules) -> str:
        """Return the Lark grammar of outputs in which every call is well formed."""


class CallReader:
    """The shared state of one output's readings."""

    def __init__(self, functions: Mapping[str, Function], *, is_forced: bool, is_required: bool) -> None:
        self.functions = functions
        self.is_forced = is_forced
        self.is_required = is_required
        self.num_calls = 0
        self.is_cut = False
        self._named: str | None = None

    def note_name(self, name: str | None) -> None:
        """Note the name of a call whose arguments have not begun; None after their beginning, or for no call."""
        self._named = name if name in self.functions else None

    @property
    def is_named(self) -> bool:
        """True while a call of a known function has a name, but no arguments yet."""
        return self._named is not None

    def cut(self, remainder: str) -> Iterator[CallDelta]:
        """Yield a call that the end of the output truncates before its arguments, if its name is known."""
        self.is_cut = self.is_cut or bool(remainder.strip(JSON_SPACE))
        if self._named is not None:
            self.num_calls += 1
            yield CallDelta(self.num_calls - 1, self._named)

    def whole_call(self, name: str, arguments: str) -> CallDelta:
        """Count a complete call, and return it."""
        self.num_calls += 1
        return CallDelta(self.num_calls - 1, name, arguments, is_last=True)


class CallParser:
    """Parses the content and the calls of one output, piece by piece.

    The merged pieces do not depend on the division of the text. White space before a call, between calls and after the
    last one is left out. Text that only resembles a call is content. Under a grammar, a marker always begins a call, so
    a call that the end of the output truncates is never content.
    """

    def __init__(
        self, form: ToolFormat, functions: Iterable[Function], *, is_forced: bool, is_required: bool = False
    ) -> None:
        self._incoming = Incoming()
        by_name = {function.name: function for function in functions}
        self._reader = CallReader(by_name, is_forced=is_forced, is_required=is_required)
        self._pieces = _read(form, self._incoming, self._reader)
        self._is_inside_call = False

    def push(self, text: str) -> list[Piece]:
        """Add text, and return the pieces that it completes."""
        if not text:
            return []
        self._incoming.text += text
        return self._take()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces at the end of the output."""
        self._incoming.is_ended = True
        return self._take()

    @property
    def num_calls(self) -> int:
        """The number of calls so far, including an incomplete one with a name."""
        return self._reader.num_calls

    @property
    def is_inside_call(self) -> bool:
        """True while the last call is incomplete."""
        return self._is_inside_call or self._reader.is_cut

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
    """Yield the pieces of an output, and None when more text is needed."""
    is_after_call = False
    if form.may_be_bare:
        end = yield from form.read_calls(incoming, 0, reader)
        # Without a marker, a call has certainly begun once it has the name of a function.
        is_call = end is not None or reader.is_named or reader.is_required
        if is_call and _ends_in_call(incoming, reader):
            yield from reader.cut(incoming.text[end or 0 :])
            return
        begun = (yield from incoming.literal(0, form.content_begin)) if end is None and form.content_begin else None
        incoming.consume(end or begun or 0)
        is_after_call = end is not None
    while True:
        reader.note_name(None)
        begin = yield from _content(incoming, form.marker, reader, is_after_call=is_after_call)
        if begin is None:
            return
        end = yield from form.read_calls(incoming, begin + len(form.marker), reader)
        if _ends_in_call(incoming, reader):
            yield from reader.cut(incoming.text[end or 0 :])
            return
        if end is None:
            yield incoming.consume(begin + len(form.marker))
        else:
            incoming.consume(end)
        is_after_call = end is not None


def _ends_in_call(incoming: Incoming, reader: CallReader) -> bool:
    """Return whether the output ended while calls were read under a grammar, so that they match, but are truncated.

    The end is set after all text was read, so a reading that sees it was waiting for more text.
    """
    return reader.is_forced and incoming.is_ended


def _content(
    incoming: Incoming, marker: str, reader: CallReader, *, is_after_call: bool
) -> Generator[Piece | None, None, int | None]:
    """Yield the content before a marker, without white space at its end; return the marker's position, or None."""
    while True:
        text = incoming.text
        begin = text.find(marker)
        sure = text[:begin] if begin >= 0 else text[: len(text) - _begun(text, marker)]
        if content := incoming.consume(len(sure.rstrip(JSON_SPACE))):
            is_after_call = False
            yield content
        if begin >= 0:
            return begin - len(content)
        if incoming.is_ended:
            remainder = incoming.consume(len(incoming.text))
            if reader.is_required:
                # A part of the marker is the beginning of a truncated call.
                begun = remainder[len(remainder) - _begun(remainder, marker) :]
                yield from reader.cut(begun)
                remainder = remainder.removesuffix(begun)
            if remainder.strip(JSON_SPACE) or not (is_after_call or reader.is_required):
                yield remainder
            return None
        yield None


def _begun(text: str, marker: str) -> int:
    """Return the length of the longest proper prefix of a marker with which the text ends."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)
