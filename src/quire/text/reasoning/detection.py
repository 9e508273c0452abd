"""Detection of a model's format of thinking: thoughts that its chat template writes, drops or asks for.

In this order: the template writes the thoughts of a message so that the parser of a format returns them; it begins the
model's message inside or behind the marks of a format; it drops from an earlier message what is between the marks; it
shows the marks to the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.sequences.thinking import ThinkingPhase
from quire.text.chat.chat_template import ChatTemplate
from quire.text.chat.trials import ASK, Detection, Detections, TemplateTrial, answer_in, call_of, header_of, tool_of
from quire.text.reasoning.formats import REASONING_FORMATS
from quire.text.reasoning.parser import ReasoningFormat
from quire.text.reasoning.tags import ReasoningTags

THOUGHT: Final = "kqthought"
ANSWER: Final = "kqanswer"
_SPOKEN: Final = {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}
_CALL: Final = call_of(ANSWER, {})
_CALLED: Final = {"role": "assistant", "content": "", "reasoning_content": THOUGHT, "tool_calls": [_CALL]}
_RESULT: Final = {"role": "tool", "tool_call_id": _CALL["id"], "name": ANSWER, "content": "kqresult"}
_TOOL: Final = tool_of(ANSWER, {"type": "object", "properties": {}})
_LATER: Final = {"role": "assistant", "content": "kqlater"}
_PROMPTS: Final = [TemplateTrial([ASK], begins=True, thinks=thinks) for thinks in (None, True, False)]
# Some templates write thoughts only while thinking is on, or only beside calls.
_WRITTEN: Final = [
    TemplateTrial([ASK, _SPOKEN]),
    TemplateTrial([ASK, _SPOKEN], thinks=True),
    TemplateTrial([ASK, _CALLED, _RESULT], [_TOOL], thinks=True),
]


_DETECTIONS: Final = Detections[ReasoningFormat]()


def choose_reasoning_format(name: str, template: ChatTemplate) -> Detection[ReasoningFormat]:
    """Return the format of the thinking of a model, found once for each template.

    Args:
        name: a format of `REASONING_FORMATS`, "none", or "auto" for the one that the template shows.
        template: the model's template.
    """
    if name != "auto":
        return Detection(REASONING_FORMATS.get(name), "as it is set")
    return _DETECTIONS.of(template, name, lambda: _detect(template, list(REASONING_FORMATS.values())))


def _detect(template: ChatTemplate, forms: Sequence[ReasoningFormat]) -> Detection[ReasoningFormat]:
    kept = _split_trial(THOUGHT + ANSWER)
    marked = [_split_trial(f"{form.start}{THOUGHT}{form.end}{ANSWER}") for form in forms]
    texts = template.try_all([*_PROMPTS, *_WRITTEN, kept, *marked])
    prompts = [text for text in texts[:3] if text is not None]
    written, without_marks, dropped = texts[3:6], texts[6] or "", texts[7:]
    headers = [header_of(prompt) for prompt in prompts]
    shown = "\n".join([*prompts, *filter(None, written)])
    splits = {form.name: text for form, text in zip(forms, dropped, strict=True)}
    forms = _told_apart(forms, shown)
    for form in forms:
        if any(_reads(form, answer_in(text, header), header) for text in written for header in headers):
            return Detection(form, "in which the chat template writes thoughts")
    for form in forms:
        if any(form.start in header or form.end in header for header in headers):
            return Detection(form, "with which the chat template begins answers")
    for form in forms:
        text = splits[form.name]
        if THOUGHT in without_marks and text is not None and ANSWER in text and THOUGHT not in text:
            return Detection(form, "which the chat template drops from earlier messages")
    for form in forms:
        if any(form.start in prompt and form.end in prompt for prompt in prompts):
            return Detection(form, "which the instructions of the chat template show")
    literals = template.literals if None in written else ""
    for form in forms:
        if form.start in literals and form.end in literals:
            return Detection(form, "whose marks are in the chat template")
    return Detection(None, "the chat template shows none")


def _told_apart(forms: Sequence[ReasoningFormat], shown: str) -> list[ReasoningFormat]:
    """Return the formats, of those with the same marks only the one whose tags of answers a text has, or that has none.

    Args:
        forms: formats.
        shown: all that the template has written.
    """

    def has_shown_tags(form: ReasoningFormat) -> bool:
        return isinstance(form, ReasoningTags) and any(tag and tag in shown for tag, _ in form.answer_tags)

    def is_plain(form: ReasoningFormat) -> bool:
        return not isinstance(form, ReasoningTags) or not form.answer_tags

    told = []
    for form in forms:
        others = [other for other in forms if other.start == form.start and other is not form]
        is_better = not any(map(has_shown_tags, others)) if is_plain(form) else has_shown_tags(form)
        if is_better or not others:
            told.append(form)
    return told


def _split_trial(content: str) -> TemplateTrial:
    """Return a conversation with thoughts in the content of an earlier message, where templates drop them."""
    return TemplateTrial([ASK, {"role": "assistant", "content": content}, ASK, _LATER, ASK])


def _reads(form: ReasoningFormat, answer: str | None, header: str) -> bool:
    """Return whether a format reads the thought and the answer in a message behind a header."""
    phases = [ThinkingPhase.BEFORE, *([ThinkingPhase.INSIDE] if form.start in header else [])]
    for phase in phases if answer is not None else ():
        parser = form.parser(phase)
        (early, text), (late, rest) = parser.push(answer or ""), parser.finish()
        if (early + late).strip() == THOUGHT and ANSWER in text + rest and THOUGHT not in text + rest:
            return True
    return False
