"""Calls of functions in what a model writes: how each format is read, and the grammar that a model is held to."""

from quire.text.tool_calls.calls import CallDelta, Function, merge
from quire.text.tool_calls.formats import FORMATS, choose_format
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.parser import CallParser, ToolFormat

__all__ = ["FORMATS", "CallDelta", "CallParser", "CallRules", "Function", "ToolFormat", "choose_format", "merge"]
