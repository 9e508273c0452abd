"""Thinking between two tags, before the answer: `<think>` and `</think>`, and other families' tags."""

from __future__ import annotations

from dataclasses import dataclass

from quire.sequences.thinking import ThinkingPhase
from quire.text.reasoning.parser import ReasoningSplit, begun_length


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """A format with a tag before the thinking and one after it.

    Args:
        name: name in options.
        start: tag before the thinking.
        end: tag after the thinking.
        header: text after the opening tag that is not reasoning.
        boundaries: tokens after which a new turn begins, in addition to the model's end tokens.
        has_headers: True if answers begin with a marker too.
        answer_tags: pairs of tags that may be around the answer and are left out; the opening one may be "".
    """

    name: str
    start: str
    end: str
    header: str = ""
    boundaries: tuple[str, ...] = ()
    has_headers: bool = False
    answer_tags: tuple[tuple[str, str], ...] = ()

    @property
    def close(self) -> str:
        """The tag after the thinking."""
        return self.end

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The two tags."""
        return self.start, self.end

    def parser(self, phase: ThinkingPhase) -> TagParser:
        """Return the parser of an output that begins in a phase."""
        return TagParser(self, phase)


class TagParser:
    """Parser of one output with tags.

    An output may think once, before its answer; a later opening tag is content. White space next to the tags is left
    out. An opening tag at the beginning of an output that begins inside thinking is left out too: some models repeat
    the tag that the prompt has.
    """

    def __init__(self, form: ReasoningTags, phase: ThinkingPhase) -> None:
        self._form = form
        self._phase = phase
        self._held = ""
        # Texts that are left out at the beginning of the thinking.
        self._leads = [form.start, form.header] if form.header else [form.start]
        self._skips_space = False
        # The tag after the answer, once the beginning of the answer is known; "" if there is none.
        self._closing: str | None = None

    def push(self, text: str) -> ReasoningSplit:
        """Add text, and return the text that is assigned now."""
        self._held += text
        return self._take(is_ended=False)

    def finish(self) -> ReasoningSplit:
        """Return the remaining text at the end of the output."""
        return self._take(is_ended=True)

    def _take(self, *, is_ended: bool) -> ReasoningSplit:
        if self._phase is ThinkingPhase.BEFORE:
            self._begin(is_ended=is_ended)
        reasoning = self._reasoning(is_ended=is_ended) if self._phase is ThinkingPhase.INSIDE else ""
        if self._phase is not ThinkingPhase.AFTER:
            return ReasoningSplit(reasoning)
        if self._closing is None:
            self._begin_answer(is_ended=is_ended)
        content = "" if self._closing is None else self._content(is_ended=is_ended)
        return ReasoningSplit(reasoning, content)

    def _begin(self, *, is_ended: bool) -> None:
        """Decide whether the output begins with the opening tag, once enough of it is known."""
        text = self._held.lstrip()
        if text.startswith(self._form.start):
            self._phase, self._held = ThinkingPhase.INSIDE, text
        elif is_ended or not self._form.start.startswith(text):
            self._phase = ThinkingPhase.AFTER

    def _begin_answer(self, *, is_ended: bool) -> None:
        """Decide whether the answer is between tags, once enough of it is known; leave the opening tag out."""
        text = self._held.lstrip()
        tags = self._form.answer_tags
        found = next(((begin, end) for begin, end in tags if text.startswith(begin)), None)
        if found is not None:
            self._held, self._closing, self._skips_space = text.removeprefix(found[0]), found[1], True
        elif is_ended or not any(begin.startswith(text) for begin, _ in tags):
            self._closing = ""

    def _content(self, *, is_ended: bool) -> str:
        """Take the content that is known, and the tag after it."""
        if self._skips_space:
            self._held = self._held.lstrip()
            self._skips_space = not self._held
        end = self._held.find(self._closing) if self._closing else -1
        if end >= 0:
            content, self._held = self._held[:end].rstrip(), self._held[end + len(self._closing or "") :]
            self._closing, self._skips_space = "", True
            return content + self._content(is_ended=is_ended)
        sure = len(self._held)
        if self._closing and not is_ended:
            sure = len(self._held[: sure - begun_length(self._held, self._closing)].rstrip())
        content, self._held = self._held[:sure], self._held[sure:]
        return content

    def _reasoning(self, *, is_ended: bool) -> str:
        """Take the reasoning that is known, and the closing tag after it."""
        while self._leads:
            text, lead = self._held.lstrip(), self._leads[0]
            if len(text) < len(lead) and lead.startswith(text) and not is_ended:
                return ""
            self._held = text.removeprefix(lead).lstrip()
            del self._leads[0]
            if not self._held and not is_ended:
                # White space that comes later belongs to the beginning too.
                self._leads = self._leads or [""]
                return ""
        end = self._held.find(self._form.end)
        if end >= 0:
            reasoning, self._held = self._held[:end].rstrip(), self._held[end + len(self._form.end) :]
            self._phase, self._skips_space = ThinkingPhase.AFTER, True
            return reasoning
        sure = len(self._held)
        if not is_ended:
            sure = len(self._held[: sure - begun_length(self._held, self._form.end)].rstrip())
        reasoning, self._held = self._held[:sure], self._held[sure:]
        return reasoning
