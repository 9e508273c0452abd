"""DeepSeek's formats: marks around the list of calls and around each call, a name, and arguments as JSON."""

from __future__ import annotations

from quire.text.tool_calls import grammar
from quire.text.tool_calls.grammar import CallRules, literal
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.object_calls import read_arguments
from quire.text.tool_calls.parser import CallReader

OPEN, CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, END_CALL, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIND = "function"
FENCE, END_FENCE = "```json", "```"
HEAD, TAIL = f"\n{FENCE}\n", f"\n{END_FENCE}"


class DeepSeek:
    """Both forms are parsed for every model; the template determines the form of the grammar.

    Source: DeepSeek V3 and R1 (`function`, the name, a block of code); V3.1 (the name, the arguments).
    """

    name = "deepseek"
    marker = OPEN
    other_markers = (CLOSE, CALL, END_CALL, SEPARATOR)
    may_be_bare = False
    id_chars = None
    answer_head = ""

    def __init__(self, *, is_fenced: bool) -> None:
        self.is_fenced = is_fenced

    @classmethod
    def for_template(cls, source: str) -> DeepSeek:
        """Return the format in the form that a template shows."""
        return cls(is_fenced=FENCE in source)

    @staticmethod
    def is_shown_by(source: str) -> bool:
        """Return whether a chat template shows the format to the model."""
        return OPEN in source

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read calls up to their closing mark, which the end of the output or a stop string may truncate."""
        end: int | None = None
        while True:
            opened = yield from incoming.literal(pos, CALL)
            after = None if opened is None else (yield from self._read_call(incoming, opened, reader))
            if after is None:
                break
            pos = end = after
        if end is None:
            return None
        closed = yield from incoming.literal(end, CLOSE, may_be_cut=True)
        return end if closed is None else closed

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: free text, optionally followed by calls; or calls only."""
        open_all, close_all, open_one, close_one, separator = (
            grammar.marker(mark, rules.tokens) for mark in (OPEN, CLOSE, CALL, END_CALL, SEPARATOR)
        )
        options = []
        for idx, function in enumerate(rules.functions):
            if self.is_fenced:
                name = literal(function.name + HEAD)
                options.append(f"{literal(KIND)} {separator} {name} args_{idx} {literal(TAIL)}")
            else:
                options.append(f"{literal(function.name)} {separator} args_{idx}")
        between = '"\\n" ' if self.is_fenced else ""
        more = f" ({between}call)*" if rules.is_parallel else ""
        lines = [f"call: {open_one} ({' | '.join(options)}) {close_one}", f"calls: call{more} {close_all}"]
        lines += grammar.arguments(rules)
        if rules.is_required:
            return grammar.whole([f"start: {open_all} calls", *lines])
        return grammar.whole(["start: free | opened calls", *grammar.free_text(rules, OPEN), *lines])

    def _read_call(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read one call after its opening mark."""
        begin = yield from incoming.past_space(pos)
        assert begin is not None
        end = yield from incoming.name(begin)
        after = None if end is None else (yield from incoming.literal(end, SEPARATOR))
        if end is None or after is None:
            return None
        if not self.is_fenced:
            reader.note_name(incoming.text[begin:end])
        bracket = yield from incoming.literal(after, "{")
        is_fenced = bracket is None
        if bracket is None:
            name_pos = yield from incoming.past_space(after)
            assert name_pos is not None
            begin = name_pos
            end = yield from incoming.name(begin)
            if end is not None and end < len(incoming.text):
                reader.note_name(incoming.text[begin:end])
            fenced = None if end is None else (yield from incoming.literal(end, FENCE))
            bracket = None if fenced is None else (yield from incoming.literal(fenced, "{"))
        if bracket is None or end is None or incoming.text[begin:end] not in reader.functions:
            return None
        read = yield from read_arguments(incoming, bracket - 1, reader, incoming.text[begin:end])
        if read is None:
            return None
        pos = read
        if is_fenced:
            fenced = yield from incoming.literal(pos, END_FENCE, may_be_cut=True)
            pos = pos if fenced is None else fenced
        closed = yield from incoming.literal(pos, END_CALL, may_be_cut=True)
        return pos if closed is None else closed
