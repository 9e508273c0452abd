"""gpt-oss' format (harmony): a message of the channel `commentary` to a function, with arguments as JSON."""

from __future__ import annotations

from quire.text.reasoning.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, START, TO_FUNCTION
from quire.text.tool_calls import grammar
from quire.text.tool_calls.grammar import CallRules, literal
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.object_calls import read_arguments
from quire.text.tool_calls.parser import CallReader

MAX_HEADER_CHARS = 256


class HarmonyCalls:
    """Each call is a message. The parser of reasoning reads all other messages, and passes calls on.

    The grammar covers the whole output, including messages of reasoning, because a call comes before the channel
    `final`, which ends thinking in outputs without calls.

    Source: OpenAI's harmony response format.
    """

    name = "harmony"
    marker = TO_FUNCTION
    other_markers = (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)
    may_be_bare = False
    content_begin = ""
    id_chars = None
    counted_id = ""
    answer_head = "thought* final "

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read one call and its closing mark, which may be missing if it is a stop token."""
        end = yield from incoming.name(pos)
        if end is not None and end < len(incoming.text):
            reader.note_name(incoming.text[pos:end])
        opened = None if end is None else (yield from incoming.past(end, MESSAGE, self.marker))
        if end is None or opened is None or incoming.text[pos:end] not in reader.functions:
            return None
        if opened - end > MAX_HEADER_CHARS:
            return None
        bracket = yield from incoming.literal(opened, "{")
        if bracket is None:
            return None
        after = yield from read_arguments(incoming, bracket - 1, reader, incoming.text[pos:end])
        closed = None if after is None else (yield from incoming.literal(after, CALL, may_be_cut=True))
        return after if closed is None else closed

    def grammar(self, rules: CallRules) -> str:
        """Return the grammar: messages of reasoning, and then a call or an answer."""
        start, channel, message, end, call, constrain = (
            grammar.written(mark, rules.tokens) for mark in (START, CHANNEL, MESSAGE, END, CALL, CONSTRAIN)
        )
        heads = [f"{channel} {literal(f'commentary to=functions.{one.name} ')}" for one in rules.functions]
        options = (f'{head} {constrain} "json" {message} args_{idx}' for idx, head in enumerate(heads))
        next_message = f'{end} {start} "assistant"'
        lines = [
            "TEXT: /(?s:.*)/",
            f'thought: {channel} ("analysis" | "commentary") {message} TEXT {next_message}',
            f'final: {channel} "final" {message}',
            f"one: {' | '.join(options)}",
            f"call: one {call}?",
            *grammar.arguments(rules),
        ]
        begin = "start: thought* call" if rules.is_required else "start: thought* (call | final TEXT)"
        return grammar.whole([begin, *lines])
