"""The request fields for reasoning, and reasoning in answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.server.requests.fields import Fields
from quire.server.state.state import ServerState
from quire.text.reasoning import ReasoningModel, ReasoningSplit, SampleReasoning

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
REASONING_FIELDS = ("reasoning_effort", "include_reasoning", "thinking_token_budget")


def read_effort(fields: Fields) -> dict[str, Any]:
    """Return the template variables for `reasoning_effort`; templates without them ignore them."""
    effort = fields.text("reasoning_effort")
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise InvalidParameter("reasoning_effort", effort, f"one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}


def read_thinking(state: ServerState, fields: Fields) -> dict[str, Any]:
    """Return the sampling parameters of a model that thinks."""
    budget, model = fields.integer("thinking_token_budget", 0, 2**31 - 1), state.reasoning
    if budget is not None and (model is None or model.tokens is None):
        why = "no markers of thinking are known of the model; --reasoning-parser can set their format"
        raise UnsupportedFeature("thinking_token_budget", why)
    return {} if model is None else {**model.sampling(), "thinking_token_budget": budget}


@dataclass(frozen=True, slots=True)
class ReasoningFields:
    """The fields of an answer that have reasoning.

    Args:
        model: the model's properties.
        names: names of the fields; none hides reasoning.
    """

    model: ReasoningModel
    names: tuple[str, ...]

    @classmethod
    def of(cls, state: ServerState, fields: Fields) -> ReasoningFields | None:
        """Return the fields for a request; None if the format of the model's thinking is unknown."""
        is_shown = fields.flag("include_reasoning", True)
        if state.reasoning is None:
            return None
        names = ("reasoning", "reasoning_content") if state.config.reasoning_content else ("reasoning",)
        return cls(state.reasoning, names if is_shown else ())

    def deltas(self, reasoning: str) -> list[dict[str, Any]]:
        """Return the stream deltas for new reasoning."""
        return [dict.fromkeys(self.names, reasoning)] if reasoning and self.names else []

    def add_to(self, message: dict[str, Any], reasoning: str) -> dict[str, Any]:
        """Return a whole message with its reasoning; its content is null if there is only reasoning."""
        content = message["content"] or (None if reasoning else message["content"])
        return {**message, "content": content, **dict.fromkeys(self.names, reasoning or None)}


class ReasoningSplitter:
    """Splits the texts of one prompt's samples."""

    def __init__(self, fields: ReasoningFields | None) -> None:
        self._model = None if fields is None else fields.model
        self._samples: dict[int, SampleReasoning] = {}

    def add(self, index: int, prompt_ids: Sequence[int], text: str, *, is_finished: bool) -> ReasoningSplit:
        """Return the reasoning and the content that a sample's new text completes."""
        if self._model is None:
            return ReasoningSplit(content=text)
        if index not in self._samples:
            self._samples[index] = self._model.sample(prompt_ids)
        return self._samples[index].add(text, is_finished=is_finished)
