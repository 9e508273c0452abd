"""The formats of tool calls, and the choice of a model's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire.text.chat.written_calls import CLOSE, OPEN, SHOWN
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.harmony import HarmonyCalls
from quire.text.tool_calls.incoming import Incoming, Reading
from quire.text.tool_calls.markup import (
    JSON_WORDS,
    PYTHON_WORDS,
    CallObject,
    JsonArguments,
    KeywordArguments,
    Markup,
    TaggedArguments,
)
from quire.text.tool_calls.markup_grammar import markup_grammar
from quire.text.tool_calls.markup_reader import BlockReader
from quire.text.tool_calls.parser import CallReader, ToolFormat
from quire.text.tool_calls.value_grammar import ValueSyntax

PYTHON_VALUES = ValueSyntax(words=PYTHON_WORDS, comma=", ", colon=": ")
PYTHON_KEYS = replace(PYTHON_VALUES, colon="=", bare_key="[a-zA-Z0-9_.-]{1,64}")
GEMMA_VALUES = ValueSyntax(
    words=JSON_WORDS, comma=",", colon=":", bare_key="[a-zA-Z0-9_.$-]{1,64}", quote='<|"|>', is_sorted=True
)

# Hermes 2 Pro; Qwen 2.5 and 3.
HERMES = Markup(begin="<tool_call>", open="\n", arguments=CallObject(), close="\n", end="</tool_call>", next_block="\n")
# Llama 3.1, 3.2 and 3.3.
LLAMA3 = Markup(
    begin="<|python_tag|>", between="; ", arguments=CallObject(arguments_key="parameters"), may_be_bare=True
)
# Mistral 7B v0.3, Nemo and Small: an array, after a space in the oldest.
MISTRAL_LIST = Markup(
    begin="[TOOL_CALLS]",
    open="[",
    between=", ",
    arguments=CallObject(),
    close="]",
    inner_marks=("[ARGS]", "[CALL_ID]"),
    id_chars=9,
)
MISTRAL_SPACED_LIST = replace(MISTRAL_LIST, open=" [")
# Magistral and Devstral: a mark and a name for each call; Small 3.2: also an id.
MISTRAL_NAMED = replace(MISTRAL_LIST, open="", between=None, name_end="[ARGS]", arguments=JsonArguments(), close="")
MISTRAL_IDS = replace(MISTRAL_NAMED, id_begin="[CALL_ID]", id_pattern="[a-zA-Z0-9]{9}")
MISTRAL_UNMARKED = replace(MISTRAL_IDS, name_end="")
# Qwen3-Coder, Qwen3-Next and Qwen3.5.
QWEN3_XML = replace(
    HERMES,
    call_begin="<function=",
    name_end=">\n",
    arguments=TaggedArguments(key_begin="<parameter=", key_end=">\n", value_end="\n</parameter>\n"),
    call_end="</function>",
)
# Gemma 4: strings are between marks, and have no escapes.
GEMMA4 = Markup(
    begin="<|tool_call>",
    call_begin="call:",
    name_end="{",
    arguments=KeywordArguments(keys=GEMMA_VALUES, values=GEMMA_VALUES),
    call_end="}",
    end="<tool_call|>",
    inner_marks=(GEMMA_VALUES.quote,),
)
# LFM2 and LFM2.5.
LFM2 = Markup(
    begin=OPEN,
    open="[",
    between=", ",
    name_end="(",
    arguments=KeywordArguments(keys=PYTHON_KEYS, values=PYTHON_VALUES),
    call_end=")",
    close="]",
    end=CLOSE,
)
# DeepSeek V3.1; then V3 and R1, with the kind of the call and a block of code.
DEEPSEEK = Markup(
    begin="<｜tool▁calls▁begin｜>",
    between="",
    call_begin="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    arguments=JsonArguments(),
    call_end="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
    inner_marks=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    between="\n",
    call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
)


@dataclass(frozen=True, slots=True)
class MarkupFormat:
    """A format whose calls have one of several markups.

    Args:
        name: name in options.
        markups: markups; all are read, the first one first, and the grammar has the first one. All have one mark.
    """

    name: str
    markups: tuple[Markup, ...]

    @property
    def marker(self) -> str:
        """The marker that begins calls."""
        return self.markups[0].begin

    @property
    def other_markers(self) -> tuple[str, ...]:
        """Further texts of the format for which a tokenizer may have single tokens."""
        return self.markups[0].marks[1:]

    @property
    def may_be_bare(self) -> bool:
        """True if an output may begin with calls without a marker."""
        return self.markups[0].may_be_bare

    @property
    def id_chars(self) -> int | None:
        """The length of call ids (letters and digits) that templates require; None for any length."""
        return self.markups[0].id_chars

    @property
    def answer_head(self) -> str:
        """No rules: the grammar begins after the reasoning."""
        return ""

    def read_calls(self, incoming: Incoming, pos: int, reader: CallReader) -> Reading:
        """Read a block of calls in any of the markups."""
        for markup in self.markups:
            reader.note_name(None)
            end = yield from BlockReader(markup, incoming, reader).block(pos)
            # The end of the output may truncate a call whose name is known.
            if end is not None or (incoming.is_ended and reader.is_named):
                return end
        return None

    def grammar(self, rules: CallRules) -> str:
        """Return the Lark grammar of outputs in which every call is well formed."""
        return markup_grammar(self.markups[0], rules)

    def led_by(self, markup: Markup) -> MarkupFormat:
        """Return the format with another markup as the first one."""
        return replace(self, markups=(markup, *(other for other in self.markups if other != markup)))


ALL: tuple[ToolFormat, ...] = (
    MarkupFormat("deepseek", (DEEPSEEK, DEEPSEEK_FENCED)),
    MarkupFormat("gemma4", (GEMMA4,)),
    HarmonyCalls(),
    MarkupFormat("hermes", (HERMES,)),
    MarkupFormat("lfm2", (LFM2,)),
    MarkupFormat("llama3", (LLAMA3,)),
    MarkupFormat("mistral", (MISTRAL_LIST, MISTRAL_SPACED_LIST, MISTRAL_NAMED, MISTRAL_IDS, MISTRAL_UNMARKED)),
    MarkupFormat("qwen3_xml", (QWEN3_XML,)),
)
FORMATS: Mapping[str, ToolFormat] = {form.name: form for form in ALL}
# The texts by which a template shows a format: all of one of the groups.
SHOWN_BY: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "deepseek": ((DEEPSEEK.begin,),),
    "gemma4": ((GEMMA4.begin,),),
    "harmony": (("<|channel|>", "functions."),),
    "hermes": ((HERMES.begin,),),
    "lfm2": tuple((mark,) for mark in SHOWN),
    "llama3": ((LLAMA3.begin,), ('"parameters": dictionary',)),
    "mistral": ((MISTRAL_LIST.begin,),),
    "qwen3_xml": ((QWEN3_XML.begin, "<function=", "<parameter="),),
}
# Texts of other formats with the same marker.
NOT_SHOWN_BY: Mapping[str, tuple[str, ...]] = {"hermes": ("<function=", "<arg_key>")}
# Markups that are not their format's first one, and the texts by which a template of the format shows them.
MARKUPS_SHOWN_BY: tuple[tuple[Markup, tuple[str, ...]], ...] = (
    (DEEPSEEK_FENCED, ("```json",)),
    (MISTRAL_IDS, ("[ARGS]", "[CALL_ID]")),
    (MISTRAL_NAMED, ("[ARGS]",)),
    (MISTRAL_SPACED_LIST, ("[TOOL_CALLS] [",)),
)


def choose_format(name: str, template: str) -> ToolFormat | None:
    """Return a model's format, with the markup that its template shows."""
    if name == "auto":
        names = [name for name in FORMATS if _is_shown(name, template)]
        if len(names) != 1:
            return None
        name = names[0]
    form = FORMATS[name]
    if isinstance(form, MarkupFormat):
        for markup, texts in MARKUPS_SHOWN_BY:
            if markup in form.markups and all(text in template for text in texts):
                return form.led_by(markup)
    return form


def _is_shown(name: str, template: str) -> bool:
    """Return whether a chat template shows a format to the model."""
    is_shown = any(all(text in template for text in group) for group in SHOWN_BY[name])
    return is_shown and not any(text in template for text in NOT_SHOWN_BY.get(name, ()))
