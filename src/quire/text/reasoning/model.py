"""A model's thinking: its format, the markers as tokens, and the split of each sample's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.hints import find_parser
from quire.sequences.thinking import ThinkingPhase, ThinkingTokens
from quire.text.chat.chat_template import ChatTemplate
from quire.text.reasoning.detection import choose_reasoning_format
from quire.text.reasoning.formats import REASONING_FORMATS
from quire.text.reasoning.parser import ReasoningFormat, ReasoningSplit
from quire.text.tokenizers.tokenizer import Tokenizer

# Number of last tokens of a prompt whose text shows the phase, if the markers are not tokens.
TAIL_TOKENS = 64


@dataclass(frozen=True, slots=True)
class ReasoningModel:
    """The properties of a model that determine how its output splits into reasoning and content.

    Args:
        form: format of the model's thinking.
        tokenizer: the model's tokenizer.
        tokens: markers as tokens; None if they are not added tokens, so that thinking is known from text only.
        header: text with which the chat template begins the model's turn, or "".
    """

    form: ReasoningFormat
    tokenizer: Tokenizer
    tokens: ThinkingTokens | None
    header: str = ""

    @classmethod
    def find(
        cls,
        name: str,
        tokenizer: Tokenizer | None,
        end_token_ids: Iterable[int],
        template: ChatTemplate | None = None,
    ) -> ReasoningModel | None:
        """Return a model's properties; None if it has no chat template or no known format of thinking.

        Args:
            name: a format of `REASONING_FORMATS`, or vLLM's name for one; "auto" for the one in the chat template, or
                "none".
            tokenizer: the model's tokenizer.
            end_token_ids: tokens that end the model's turns.
            template: chat template of the prompts; None for the model's own.

        Raises:
            InvalidParameter: no such format.
        """
        parser = find_parser("reasoning_parser", name, ("auto", "none", *REASONING_FORMATS))
        if tokenizer is None or tokenizer.chat_template is None:
            return None
        form = choose_reasoning_format(parser, tokenizer.chat_template).form
        header = (template or tokenizer.chat_template).turn_header
        return None if form is None else cls.of(form, tokenizer, end_token_ids, header)

    @classmethod
    def of(
        cls, form: ReasoningFormat, tokenizer: Tokenizer, end_token_ids: Iterable[int], header: str = ""
    ) -> ReasoningModel:
        """Return the properties of a model whose format of thinking is known.

        Args:
            form: format of the model's thinking.
            tokenizer: the model's tokenizer.
            end_token_ids: tokens that end the model's turns.
            header: text that the chat template writes behind the last message.
        """
        for marker in (form.start, form.end):
            header = header.partition(marker)[0]
        header = header.strip()
        added = tokenizer.added_ids
        boundary_ids = frozenset(end_token_ids) | {added[text] for text in form.boundaries if text in added}
        start_ids, end_ids, close_ids = (_marker_ids(tokenizer, text) for text in (form.start, form.end, form.close))
        tokens = None
        # Ordinary tokens can spell one marker in several ways, so only added tokens delimit thinking.
        if start_ids and end_ids and close_ids and len(start_ids) == 1:
            turn_ids = _header_ids(tokenizer, header)
            tokens = ThinkingTokens(start_ids[0], end_ids, close_ids, boundary_ids, form.has_headers, turn_ids)
        return cls(form, tokenizer, tokens, header)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that the split needs."""
        added, special = self.tokenizer.added_ids, self.tokenizer.special_ids
        kept = [added[text] for text in self.form.special_tokens if added.get(text) in special]
        return {"kept_special_ids": tuple(kept), "thinking": self.tokens}

    def phase_after(self, prompt_ids: Sequence[int]) -> ThinkingPhase:
        """Return the phase in which the output after a prompt begins."""
        if self.tokens is not None:
            return self.tokens.state_after_prompt(prompt_ids).phase
        tail = self.tokenizer.decode(prompt_ids[-TAIL_TOKENS:], skip_special_tokens=False)
        # Markers before the model's turn belong to earlier messages.
        tail = tail.rpartition(self.header)[2] if self.header else tail
        start, end = tail.rfind(self.form.start), tail.rfind(self.form.end)
        if start < 0 and end < 0:
            return ThinkingPhase.BEFORE
        # An earlier turn's thinking has text after it.
        if tail[max(start, end) :].strip() not in (self.form.start, self.form.end):
            return ThinkingPhase.BEFORE
        return ThinkingPhase.INSIDE if start > end else ThinkingPhase.AFTER

    def sample(self, prompt_ids: Sequence[int]) -> SampleReasoning:
        """Return the splitter of one sample of a prompt."""
        return SampleReasoning(self, prompt_ids)

    def split(self, prompt_ids: Sequence[int], text: str) -> ReasoningSplit:
        """Return the reasoning and the content of a whole text."""
        return self.sample(prompt_ids).add(text, is_finished=True)

    def count(self, prompt_ids: Sequence[int], token_ids: Iterable[int]) -> int:
        """Return the number of thinking tokens of a whole output; 0 if the markers are not tokens."""
        if self.tokens is None:
            return 0
        return self.tokens.advance_all(self.tokens.state_after_prompt(prompt_ids), token_ids).num_tokens


class SampleReasoning:
    """The splitter of one sample's text, incrementally or of the whole text."""

    def __init__(self, model: ReasoningModel, prompt_ids: Sequence[int]) -> None:
        self._parser = model.form.parser(model.phase_after(prompt_ids))

    def add(self, text: str, *, is_finished: bool) -> ReasoningSplit:
        """Return the reasoning and the content that new text completes."""
        reasoning, content = self._parser.push(text)
        if not is_finished:
            return ReasoningSplit(reasoning, content)
        remainder = self._parser.finish()
        return ReasoningSplit(reasoning + remainder.reasoning, content + remainder.content)


def _header_ids(tokenizer: Tokenizer, header: str) -> tuple[int, ...]:
    """Return the tokens of a header that do not depend on the text before it, which may change the first token."""
    token_ids = tuple(tokenizer.encode(header, add_special_tokens=False)) if header else ()
    added = [idx for idx, token_id in enumerate(token_ids) if token_id in tokenizer.added_ids.values()]
    return token_ids[added[-1] :] if added else token_ids[1:] or token_ids


def _marker_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of a marker; none if it does not begin with an added token."""
    token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    return token_ids if token_ids and token_ids[0] in tokenizer.added_ids.values() else ()
