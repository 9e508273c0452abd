"""The request fields for tools."""

from __future__ import annotations

from quire.server.requests.fields import Fields
from quire.server.state.state import ServerState
from quire.text.tool_calls import ToolModel, ToolUse

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


def read_tool_use(state: ServerState, fields: Fields) -> ToolUse | None:
    """Read a chat's `tools`, `tool_choice` and `parallel_tool_calls`; None if no function may be called."""
    asked = [fields.get(name) for name in TOOL_FIELDS]
    if asked == [None] * len(asked):
        return None
    llm = state.llm
    model = ToolModel(llm.tokenizer, state.tool_format, llm.resolved.vocab_size, "--tool-call-parser")
    use = model.read(*asked)
    return None if use is None else use.after(fields.get("messages"))
