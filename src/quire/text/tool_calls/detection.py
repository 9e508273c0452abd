"""Detection of a model's format of tool calls: calls that its chat template writes, read back by every format.

A template writes the calls of earlier messages as the model writes its own. So calls with known names and values are
rendered, and the format is the one whose parser returns exactly these. Several formats may do so, such as those of
which one has a mark more: the one wins that returns more of the calls, then the one whose grammar accepts what the
template wrote, then the one that leaves the least text around calls.

Some templates leave calls out, or refuse them. Their instructions to the model may show the marks of a format; at last,
the literals of the template may.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, NamedTuple

from quire.sequences.structured import GrammarSource
from quire.sequences.thinking import ThinkingPhase
from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.trials import (
    ASK,
    Detection,
    Detections,
    TemplateTrial,
    after,
    answer_in,
    call_of,
    header_of,
    tool_of,
)
from quire.text.reasoning.harmony import HarmonyParser
from quire.text.structured.compiled_grammar import accepts_beginning
from quire.text.tool_calls.calls import CallDelta, Function, Piece, merge
from quire.text.tool_calls.formats import FORMATS, MarkupFormat
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.harmony import HarmonyCalls
from quire.text.tool_calls.markup import CallObject, TaggedArguments, parts_of
from quire.text.tool_calls.parser import CallParser, ToolFormat

# Formats without marks are tried on text that ends up to this many characters before the message's end.
MAX_TURN_END_CHARS = 64
# Shorter texts, such as brackets, are in all texts.
MIN_MARK_CHARS = 4


Calls = Sequence[tuple[str, Mapping[str, Any]]]


class CallTrial(NamedTuple):
    """A message with calls that a template is to write.

    Args:
        calls: name and arguments of each.
        functions: functions that may be called.
    """

    calls: Calls
    functions: Sequence[Function]


def _function(name: str, **properties: Mapping[str, Any]) -> Function:
    """Return a function whose arguments are all required; some templates write their descriptions."""
    described = {key: {"description": "kqvalue", **schema} for key, schema in properties.items()}
    return Function(name, {"type": "object", "properties": described, "required": [*described]})


_LOOK: Final = _function("kq_look", kq_place={"type": "string"}, kq_count={"type": "integer"})
_STORE: Final = _function(
    "kq_store",
    kq_flag={"type": "boolean"},
    kq_ratio={"type": "number"},
    kq_list={"type": "array", "items": {"type": "string"}},
    kq_map={"type": "object", "properties": {"kq_row": {"type": "integer"}}},
)
_VOID: Final = _function("kq_void", kq_nothing={"anyOf": [{"type": "string"}, {"type": "null"}]})
# A text that only the first call has.
PLACE: Final = "kqone two"
_LOOKED: Final = ("kq_look", {"kq_place": PLACE, "kq_count": 4711})
_LOOKED_AGAIN: Final = ("kq_look", {"kq_place": "kqtwo", "kq_count": -3})
_STORED: Final = (
    "kq_store",
    {"kq_flag": True, "kq_ratio": 2.5, "kq_list": ["kqthree", "4"], "kq_map": {"kq_row": 0}},
)
# The first one decides whether a template writes calls. A template may write one call a message only, or not have each
# type of value, so the others rank.
TRIALS: Final = (
    CallTrial([_LOOKED], [_LOOK]),
    CallTrial([_LOOKED, _LOOKED_AGAIN], [_LOOK]),
    CallTrial([_STORED], [_STORE]),
    CallTrial([("kq_void", {"kq_nothing": None})], [_VOID]),
)


_DETECTIONS: Final = Detections[ToolFormat]()


def choose_format(name: str, template: ChatTemplate) -> Detection[ToolFormat]:
    """Return the format of the calls of a model, found once for each template.

    Args:
        name: a format of `FORMATS`, whose markup is found; "auto" for the one that the template shows.
        template: the model's template.
    """

    def detect() -> Detection[ToolFormat]:
        if name == "auto":
            return _detect(template, FORMATS.values())
        return Detection(_detect(template, [FORMATS[name]]).form or FORMATS[name], "as it is set")

    return _DETECTIONS.of(template, name, detect)


def _detect(template: ChatTemplate, forms: Iterable[ToolFormat]) -> Detection[ToolFormat]:
    template, variants = template.for_tools, [variant for form in forms for variant in _variants(form)]
    answers, instructions = _rendered(template)
    written = answers[0] or ""
    if ranked := rank(variants, answers):
        return Detection(ranked[0], "in which the chat template writes calls")
    if shown := _shown(variants, instructions or ""):
        return Detection(shown[0], "which the instructions of the chat template show")
    if PLACE in written:
        nearest = _nearest(variants, written)
        why = "the chat template writes calls in a format that is not known"
        return Detection(None, why if nearest is None else f"{why}; the nearest one is {nearest}")
    if instructions is None:
        marked = _shown(variants, template.literals)
        why = "the chat template cannot be rendered with tools"
        return Detection(None, f"{why}; its marks are those of {marked[0].name}" if marked else why)
    if answers[0] is None and (shown := _shown(variants, template.literals)):
        return Detection(shown[0], "whose marks the chat template has, although it refuses messages with calls")
    return Detection(None, "the chat template writes no calls, and its instructions show no format")


def _rendered(template: ChatTemplate) -> tuple[list[str | None], str | None]:
    """Return what the template writes for each of `TRIALS`, and what it writes before them about tools."""
    trials = [TemplateTrial([ASK], begins=True), TemplateTrial([ASK], definitions_of(TRIALS[0].functions), begins=True)]
    trials += [TemplateTrial([ASK, message_of(trial.calls)], definitions_of(trial.functions)) for trial in TRIALS]
    plain, prompt, *texts = template.try_all(trials)
    answers = [answer_in(text, header_of(prompt)) for text in texts]
    return answers, None if prompt is None else after(prompt, plain or "")


def message_of(calls: Calls) -> dict[str, Any]:
    """Return the assistant's message with calls, whose ids all templates accept."""
    written = [call_of(name, arguments, number) for number, (name, arguments) in enumerate(calls)]
    return {"role": "assistant", "content": "", "tool_calls": written}


def definitions_of(functions: Iterable[Function]) -> list[dict[str, Any]]:
    """Return the definitions of functions for a template."""
    return [tool_of(one.name, one.parameters) for one in functions]


def _variants(form: ToolFormat) -> list[ToolFormat]:
    """Return a format with each of its markups as the first one."""
    return [form.led_by(markup) for markup in form.markups] if isinstance(form, MarkupFormat) else [form]


def rank(forms: Iterable[ToolFormat], answers: Sequence[str | None]) -> list[ToolFormat]:
    """Return the formats that read the first answer exactly, the best one first.

    Args:
        forms: formats to try.
        answers: texts of messages with the calls of `TRIALS`; None where a template refuses one.
    """
    read = []
    for form in forms:
        rests = [
            None if answer is None else unread_length(form, trial, answer)
            for trial, answer in zip(TRIALS, answers, strict=True)
        ]
        if rests[0] is not None:
            read.append((-sum(rest is not None for rest in rests), rests[0], form))
    most = min((key for key, *_ in read), default=0)
    best = [(rest, form) for key, rest, form in read if key == most]
    if len(best) > 1 and importlib.util.find_spec("llguidance") is not None:
        num_accepted = [sum(map(accepts, repeat(form), TRIALS[:2], answers[:2])) for _, form in best]
        best = [one for one, num in zip(best, num_accepted, strict=True) if num == max(num_accepted)]
    best.sort(key=lambda one: one[0])
    return [form for _, form in best]


def unread_length(form: ToolFormat, trial: CallTrial, answer: str) -> int | None:
    """Return the length of the text around calls that a format reads in an answer; None if it reads other calls."""
    for text in endings(form, answer):
        pieces = parsed(form, trial.functions, [text])
        calls = [piece for piece in pieces if isinstance(piece, CallDelta)]
        if _is_same(calls, trial.calls):
            content = sum(len(piece.strip()) for piece in pieces if isinstance(piece, str))
            return content + len(answer) - len(text)
    return None


def parsed(form: ToolFormat, functions: Iterable[Function], texts: Iterable[str]) -> list[Piece]:
    """Return what a format reads in an output that comes in several texts."""
    parser = CallParser(form, functions, is_forced=False)
    pieces = [piece for text in texts for piece in parser.push(text)]
    return merge([*pieces, *parser.finish()])


def _is_same(found: Sequence[CallDelta], calls: Calls) -> bool:
    """Return whether calls have these names and values, of the same types and in the same order."""
    expected = [(name, json.dumps(arguments, sort_keys=True)) for name, arguments in calls]
    read = [(call.name, json.dumps(json.loads(call.arguments or "null"), sort_keys=True)) for call in found]
    return read == expected


def endings(form: ToolFormat, answer: str) -> Iterator[str]:
    """Yield the texts in which a format looks for its calls: calls without marks end with the output."""
    if isinstance(form, HarmonyCalls):
        # The parser of reasoning passes calls on.
        parser = HarmonyParser(ThinkingPhase.BEFORE)
        yield parser.push(answer).content + parser.finish().content
        return
    yield answer
    for length in range(1, min(len(answer), MAX_TURN_END_CHARS) if form.may_be_bare else 0):
        yield answer[:-length]


def accepts(form: ToolFormat, trial: CallTrial, answer: str | None) -> bool:
    """Return whether a format's grammar accepts the calls in an answer."""
    if answer is None:
        return False
    functions = tuple(trial.functions)
    grammar = form.grammar(CallRules(functions=functions, is_required=True, is_parallel=len(trial.calls) > 1))
    # After the first name, the mark is the one between bare calls.
    begin = answer.find(form.marker, 0, max(0, answer.find(trial.calls[0][0])))
    text = answer[begin:] if begin >= 0 else answer.lstrip()
    # The arguments of the last call and the end of the turn follow its name.
    return accepts_beginning(GrammarSource("grammar", grammar), text, text.rfind(trial.calls[-1][0]))


def _shown(forms: Iterable[ToolFormat], text: str) -> list[ToolFormat]:
    """Return the formats all of whose fixed texts are in a text, the one with the longest ones first."""
    shown = []
    for form in forms:
        marks = _marks(form)
        if marks and all(mark in text for mark in marks) and _is_told(form, text):
            shown.append((-sum(map(len, marks)), form))
    shown.sort(key=lambda one: one[0])
    return [form for _, form in shown]


def _nearest(forms: Iterable[ToolFormat], text: str) -> str | None:
    """Return the name of the format most of whose fixed texts are in a text; None if no format has half of them."""
    shares = []
    for form in forms:
        marks = _marks(form)
        share = sum(len(mark) for mark in marks if mark in text) / max(1, sum(map(len, marks)))
        shares.append((share, form.name))
    share, name = max(shares)
    return name if share >= 0.5 else None


def _marks(form: ToolFormat) -> set[str]:
    """Return the fixed texts by which a format is recognised."""
    if not isinstance(form, MarkupFormat):
        return {form.marker}
    markup = form.markups[0]
    texts = [markup.begin, markup.open, markup.call_begin, markup.name_end, markup.call_end, markup.close, markup.end]
    if isinstance(markup.arguments, TaggedArguments):
        texts += [markup.arguments.key_begin, markup.arguments.value_end]
    parts = {part for text in texts for part in parts_of(text) if len(part) >= MIN_MARK_CHARS}
    # A template may write what is beside a token with other values, as Kimi's does with names.
    inner = {part: {mark for mark in markup.inner_marks if mark in part} for part in parts}
    return {mark for part in parts for mark in inner[part] or {part}}


def _is_told(form: ToolFormat, text: str) -> bool:
    """Return whether a text says that calls are JSON, if they are objects: other formats have the same marks."""
    if not isinstance(form, MarkupFormat) or not isinstance(form.markups[0].arguments, CallObject):
        return True
    return f'"{form.markups[0].arguments.arguments_key}"' in text or "JSON" in text
