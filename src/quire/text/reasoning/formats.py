"""The formats of thinking, and the choice of a model's format."""

from __future__ import annotations

from collections.abc import Mapping

from quire.text.reasoning.harmony import CHANNEL, Harmony
from quire.text.reasoning.parser import ReasoningFormat
from quire.text.reasoning.tags import ReasoningTags

# Qwen3, DeepSeek R1, GLM and others; and Gemma 4.
THINK = ReasoningTags("think", "<think>", "</think>")
GEMMA4 = ReasoningTags("gemma4", "<|channel>", "<channel|>", "thought\n", ("<|turn>",))
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {form.name: form for form in (GEMMA4, Harmony(), THINK)}


def choose_reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """Return a model's format."""
    if name == "none":
        return None
    if name != "auto":
        return REASONING_FORMATS[name]
    # Each mark is in the templates of one family only; some templates write one tag and read the other.
    shown = {"harmony": (CHANNEL,), "gemma4": (GEMMA4.start, GEMMA4.end), "think": (THINK.start, THINK.end)}
    return next((REASONING_FORMATS[name] for name, marks in shown.items() if any(m in template for m in marks)), None)
