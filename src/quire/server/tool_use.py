"""The request fields for tools."""

from __future__ import annotations

from quire.errors import UnsupportedFeature
from quire.server.fields import Fields
from quire.server.state import ServerState
from quire.server.structured_fields import STRUCTURED_FIELDS
from quire.text.tool_calls import ToolModel, ToolUse
from quire.text.tool_calls.use import ONE_GRAMMAR

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


def read_tool_use(state: ServerState, fields: Fields) -> ToolUse | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`.

    Returns:
        The request's use of tools, None where calls are not requested.

    Raises:
        RequestError: naming the field; also where the request has another grammar than that of the tools.
    """
    llm = state.llm
    model = ToolModel(llm.tokenizer, state.tool_format, llm.resolved.vocab_size, "--tool-call-parser")
    use = model.read(*(fields.get(name) for name in TOOL_FIELDS))
    if use is None:
        return None
    for name in STRUCTURED_FIELDS:
        if fields.get(name) not in (None, {"type": "text"}):
            raise UnsupportedFeature(name, ONE_GRAMMAR)
    return use
