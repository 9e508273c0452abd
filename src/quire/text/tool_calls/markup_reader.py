"""The reader of calls in any `Markup`, while their text arrives."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from quire.text.tool_calls.argument_schema import read_schema, types_of
from quire.text.tool_calls.calls import Function, Piece, read_object
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.markup import CallObject, JsonArguments, KeywordArguments, Markup, TaggedArguments, parts_of
from quire.text.tool_calls.object_calls import Call, stream_arguments, stream_call, whole_call
from quire.text.tool_calls.parser import CallReader
from quire.text.tool_calls.typed_values import typed_json
from quire.text.tool_calls.value_grammar import ABILITIES
from quire.text.tool_calls.value_reading import CallWriter, ValueReader, literal_json

MAX_KEY_CHARS = 256
ANY_TYPE = frozenset({"null", "boolean", "integer", "number", "array", "object"})
# The call and the position after it; no call if its pieces were yielded while it arrived.
CallReading = Generator[Piece | None, None, tuple[Call | None, int] | None]


@dataclass(frozen=True, slots=True)
class BlockReader:
    """Reads blocks of calls.

    Under a grammar, calls are yielded while they arrive; else at the end of their block, so that a block with an error
    is content.
    """

    markup: Markup
    incoming: Incoming
    state: CallReader

    def block(self, pos: int) -> Reading:
        """Read a block after its first mark; the end of the output or a stop string may truncate its closing marks."""
        between = self.markup.between
        calls: list[Call] = []
        end: int | None = None
        after = yield from self._fixed(pos, self.markup.open)
        while after is not None:
            read = yield from self._call(after)
            if read is None:
                break
            call, end = read
            calls += [] if call is None else [call]
            if between is not None and between.strip():
                comma = yield from self.incoming.literal(end, between.strip())
                after = comma if comma is None else (yield from self.incoming.past_space(comma))
                if after is not None and after < len(self.incoming.text):
                    continue
                end = end if after is None else after
            closed = yield from self._ending(end)
            if closed is not None:
                yield from self._whole(calls)
                return closed
            after = end if between is not None and not between.strip() else None
        return end if self.state.is_forced else None

    def _whole(self, calls: list[Call]) -> Iterator[Piece]:
        for name, arguments in calls:
            yield self.state.whole_call(name, arguments)

    def _ending(self, pos: int) -> Reading:
        """Read the end of a block."""
        for text in (self.markup.close, self.markup.end):
            closed = yield from self._fixed(pos, text, may_be_cut=True)
            if closed is None:
                return None
            pos = closed
        if self.markup.may_be_bare and not self.markup.end:
            end = yield from self.incoming.past_space(pos)
            return end if end == len(self.incoming.text) else None
        return pos

    def _fixed(self, pos: int, text: str, *, may_be_cut: bool = False) -> Reading:
        """Read a fixed text."""
        for part in parts_of(text):
            end = yield from self.incoming.literal(pos, part, may_be_cut=may_be_cut)
            if end is None:
                return None
            pos = end
        return pos

    def _call(self, pos: int) -> CallReading:
        arguments = self.markup.arguments
        if isinstance(arguments, CallObject):
            if not self.state.is_forced:
                return (yield from whole_call(self.incoming, pos, self.state.functions, arguments.name_key))
            end = yield from stream_call(self.incoming, pos, self.state, arguments)
            return None if end is None else (None, end)
        named = yield from self._name(pos)
        begin = None if named is None else (yield from self._fixed(named[1], self.markup.name_end))
        if named is None or begin is None:
            return None
        if self.markup.may_be_bare:
            self.state.note_name(named[0].name)
        if isinstance(arguments, JsonArguments):
            return (yield from self._json(begin, named[0].name))
        writer = CallWriter(self.state, named[0].name)
        yield from writer.begin()
        if isinstance(arguments, TaggedArguments):
            end = yield from self._tagged(begin, arguments, named[0], writer)
        else:
            end = yield from self._keyword(begin, arguments, writer)
        if end is None:
            broken = writer.broken(self.incoming, begin)
            return None if broken is None else (None, broken)
        yield from writer.end()
        return writer.whole, end

    def _name(self, pos: int) -> Generator[Piece | None, None, tuple[Function, int] | None]:
        """Read a function's name, and an id of the call after it; return the function and the end."""
        after = (yield from self._server(pos)) if self.markup.server_begin else pos
        opened = None if after is None else (yield from self._fixed(after, self.markup.call_begin))
        begin = None if opened is None else (yield from self.incoming.past_space(opened))
        end = None if begin is None else (yield from self.incoming.name(begin))
        function = None if end is None else self.state.functions.get(self.incoming.text[begin:end])
        if end is None or function is None:
            return None
        # Without a mark, a name alone does not make a call.
        if end < len(self.incoming.text) and not self.markup.may_be_bare:
            self.state.note_name(function.name)
        marked = (yield from self.incoming.literal(end, self.markup.id_begin)) if self.markup.id_begin else None
        if marked is not None:
            begin = yield from self.incoming.past_space(marked)
            end = None if begin is None else (yield from self.incoming.name(begin))
        return None if end is None else (function, end)

    def _server(self, pos: int) -> Reading:
        """Read the name of a server."""
        opened = yield from self._fixed(pos, self.markup.server_begin)
        begin = None if opened is None else (yield from self.incoming.past_space(opened))
        return None if begin is None else (yield from self.incoming.name(begin))

    def _json(self, pos: int, name: str) -> CallReading:
        """Read arguments that are JSON, and the end of the call."""
        bracket = yield from self.incoming.literal(pos, "{")
        if bracket is None:
            return None
        call = None
        if self.state.is_forced:
            end = yield from stream_arguments(self.incoming, bracket - 1, self.state, name)
        else:
            end = yield from self.incoming.json_object(bracket - 1)
            call = None if end is None else (name, self.incoming.text[bracket - 1 : end])
            if call is None or read_object(call[1]) is None:
                return None
        assert end is not None
        closed = yield from self._fixed(end, self.markup.call_end, may_be_cut=True)
        if closed is None:
            return (None, end) if self.state.is_forced else None
        return call, closed

    def _keyword(self, pos: int, arguments: KeywordArguments, writer: CallWriter) -> Reading:
        values = ValueReader(quote=arguments.values.quote, bare_key=arguments.keys.bare_key)
        colon, close = arguments.keys.colon.strip(), self.markup.call_end.strip()
        return values.call(self.incoming, pos, writer, colon, close)

    def _is_ending(self, cut: str, arguments: TaggedArguments) -> bool:
        """Return whether the last text of an output begins the end of a call, and no other argument."""
        return self.markup.call_end.startswith(cut) and not arguments.key_begin.startswith(cut)

    def _tagged(self, pos: int, arguments: TaggedArguments, function: Function, writer: CallWriter) -> Reading:
        """Read arguments between tags, and the end of the call; return None if they are broken."""
        incoming, schema = self.incoming, read_schema(function, ABILITIES)
        key_pattern = re.compile(rf"[^\n{re.escape(arguments.key_end.strip()[0])}]*")
        mark = arguments.value_end.strip()
        # A value may not contain another block's beginning, since many broken blocks would take quadratic time.
        unless = "" if self.state.is_forced else self.markup.begin
        while True:
            closed = yield from self._fixed(pos, self.markup.call_end)
            if closed is not None:
                return closed
            if incoming.is_ended and self._is_ending(incoming.text[pos:].strip(), arguments):
                return len(incoming.text)
            begin = yield from self._fixed(pos, arguments.key_begin)
            end = None if begin is None else (yield from incoming.matching(begin, key_pattern, MAX_KEY_CHARS))
            opened = None if end is None else (yield from self._fixed(end, arguments.key_end))
            is_json = opened is None and end is not None and bool(arguments.json_key_end)
            if is_json and end is not None:
                opened = yield from self._fixed(end, arguments.json_key_end)
            after = None if opened is None else (yield from incoming.past(opened, mark, unless))
            if opened is None or after is None:
                return None
            key, text = incoming.text[begin:end], incoming.text[opened : after - len(mark)]
            text = text.removeprefix("\n") if arguments.key_end.endswith("\n") else text
            text = text.removesuffix("\n") if arguments.value_end.startswith("\n") else text
            kinds = types_of(schema, key)
            if arguments.json_key_end:
                kinds = ANY_TYPE if is_json else frozenset()
            value = typed_json(text, kinds)
            if value.startswith('"') and kinds & {"array", "object"}:
                value = literal_json(text) or value
            yield from writer.member(key, value)
            pos = after
