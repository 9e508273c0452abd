"""Tool calls in a model's output: the parser of each format, and the grammar that constrains the output."""

from quire.text.tool_calls.calls import CallDelta, Function, merge
from quire.text.tool_calls.detection import choose_format
from quire.text.tool_calls.formats import FORMATS
from quire.text.tool_calls.grammar import CallRules
from quire.text.tool_calls.parser import CallParser, ToolFormat
from quire.text.tool_calls.sample import SampleCalls, ToolCall
from quire.text.tool_calls.tools import read_tools
from quire.text.tool_calls.use import ToolModel, ToolUse

__all__ = [
    "FORMATS",
    "CallDelta",
    "CallParser",
    "CallRules",
    "Function",
    "SampleCalls",
    "ToolCall",
    "ToolFormat",
    "ToolModel",
    "ToolUse",
    "choose_format",
    "merge",
    "read_tools",
]
