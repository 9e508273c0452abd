"""Reasoning in a model's output: the parser of each format, and the split into reasoning and content."""

from quire.text.reasoning.detection import choose_reasoning_format
from quire.text.reasoning.formats import REASONING_FORMATS
from quire.text.reasoning.model import ReasoningModel, SampleReasoning
from quire.text.reasoning.parser import ReasoningFormat, ReasoningParser, ReasoningSplit

__all__ = [
    "REASONING_FORMATS",
    "ReasoningFormat",
    "ReasoningModel",
    "ReasoningParser",
    "ReasoningSplit",
    "SampleReasoning",
    "choose_reasoning_format",
]
