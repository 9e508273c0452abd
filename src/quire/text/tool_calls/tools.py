"""The tools of a request in OpenAI's form: their definitions, and the choice of the allowed ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter
from quire.text.tool_calls.calls import NAME, NAME_PATTERN, Function

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 18
NO_PARAMETERS = {"type": "object", "properties": {}}
NAMED = '{"type": "function", "function": {"name": "..."}}'
ALLOWED = '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
CHOICES = f'"none", "auto", "required", {NAMED} or {ALLOWED}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a request.

    Args:
        definition: definition for the chat template.
        function: function that constrains the calls.
    """

    definition: Mapping[str, Any]
    function: Function


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The functions that may be called.

    Args:
        functions: functions that may be called; empty if calls are not allowed, or there are no tools.
        is_required: True if the output must be a call.
        is_named: True if the client named the function of a single call.
    """

    functions: Sequence[Function]
    is_required: bool = False
    is_named: bool = False


def read_tools(value: object) -> list[Tool]:
    """Parse `tools`; None is an empty list."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise InvalidParameter("tools", value, "a list of tools")
    if len(value) > MAX_TOOLS:
        raise InvalidParameter("tools", f"{len(value)} tools", f"at most {MAX_TOOLS} tools")
    try:
        num_chars = len(json.dumps(value, ensure_ascii=False))
    except RecursionError as error:
        raise InvalidParameter("tools", "deeply nested tools", "nested less deeply") from error
    except (TypeError, ValueError) as error:
        raise InvalidParameter("tools", "tools", f"what JSON can hold ({error})") from error
    if num_chars > MAX_TOOLS_CHARS:
        raise InvalidParameter("tools", f"{num_chars} characters", f"at most {MAX_TOOLS_CHARS} characters of JSON")
    tools = [_read_tool(tool, f"tools[{idx}]") for idx, tool in enumerate(value)]
    seen: set[str] = set()
    for idx, tool in enumerate(tools):
        if tool.function.name in seen:
            raise InvalidParameter(f"tools[{idx}].function.name", tool.function.name, "a name that no other tool has")
        seen.add(tool.function.name)
    return tools


def read_choice(choice: object, functions: Sequence[Function]) -> ToolChoice:
    """Parse `tool_choice`; None is "auto"."""
    if choice is None or choice == "auto":
        return ToolChoice(functions)
    if choice == "none":
        return ToolChoice(())
    if choice == "required":
        if not functions:
            raise InvalidParameter("tool_choice", choice, '"none" or "auto" where there are no tools')
        return ToolChoice(functions, is_required=True)
    if not isinstance(choice, dict):
        raise InvalidParameter("tool_choice", choice, CHOICES)
    kind = choice.get("type")
    if kind == "allowed_tools":
        return _read_allowed(choice, functions)
    if kind != "function":
        raise InvalidParameter("tool_choice.type", kind, '"function" or "allowed_tools"')
    return ToolChoice([_find(choice, "tool_choice", functions)], is_required=True, is_named=True)


def _read_allowed(choice: dict[str, Any], functions: Sequence[Function]) -> ToolChoice:
    """Parse a choice that allows a subset of the functions."""
    where = "tool_choice.allowed_tools"
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise InvalidParameter(where, allowed, "an object with mode and tools")
    mode, listed = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidParameter(f"{where}.mode", mode, '"auto" or "required"')
    if not isinstance(listed, list | tuple) or not listed:
        raise InvalidParameter(f"{where}.tools", listed, f"a list of at least one {NAMED}")
    names = set()
    for idx, one in enumerate(listed):
        path = f"{where}.tools[{idx}]"
        if not isinstance(one, dict):
            raise InvalidParameter(path, one, NAMED)
        if one.get("type") != "function":
            raise InvalidParameter(f"{path}.type", one.get("type"), '"function"')
        names.add(_find(one, path, functions).name)
    return ToolChoice([function for function in functions if function.name in names], is_required=mode == "required")


def _find(named: dict[str, Any], where: str, functions: Sequence[Function]) -> Function:
    """Return the function that an object names."""
    inner = named.get("function")
    if inner is not None and not isinstance(inner, dict):
        raise InvalidParameter(f"{where}.function", inner, "an object with a name")
    name = None if inner is None else inner.get("name")
    matches = [function for function in functions if function.name == name]
    if not matches:
        raise InvalidParameter(f"{where}.function.name", name, "the name of one of the tools")
    return matches[0]


def _read_tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, dict):
        raise InvalidParameter(where, tool, "an object with type and function")
    if tool.get("type") != "function":
        raise InvalidParameter(f"{where}.type", tool.get("type"), '"function"')
    function = tool.get("function")
    where = f"{where}.function"
    if not isinstance(function, dict):
        raise InvalidParameter(where, function, "an object with a name")
    name, description, is_strict = (function.get(key) for key in ("name", "description", "strict"))
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise InvalidParameter(f"{where}.name", name, f"a string that matches ^{NAME}$")
    if description is not None and not isinstance(description, str):
        raise InvalidParameter(f"{where}.description", description, "a string")
    if is_strict is not None and not isinstance(is_strict, bool):
        raise InvalidParameter(f"{where}.strict", is_strict, "true or false")
    field = f"{where}.parameters"
    parameters = _read_parameters(function.get("parameters"), field)
    definition = {"name": name} | ({} if description is None else {"description": description})
    schema = parameters or {**NO_PARAMETERS, "additionalProperties": False}
    return Tool(
        {"type": "function", "function": {**definition, "parameters": parameters or NO_PARAMETERS}},
        Function(name, schema, is_strict=bool(is_strict), field=field),
    )


def _read_parameters(parameters: object, where: str) -> dict[str, Any] | None:
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise InvalidParameter(where, parameters, "a JSON schema, which is an object")
    kind = parameters.get("type", "object")
    if kind != "object":
        raise InvalidParameter(f"{where}.type", kind, '"object", as arguments are one')
    # Chat templates iterate over both; an error in a template would be reported for the conversation.
    properties, required = parameters.get("properties"), parameters.get("required")
    if properties is not None and not isinstance(properties, dict):
        raise InvalidParameter(f"{where}.properties", properties, "an object of JSON schemas")
    is_list = isinstance(required, list | tuple) and all(isinstance(name, str) for name in required)
    if required is not None and not is_list:
        raise InvalidParameter(f"{where}.required", required, "a list of names of properties")
    return parameters
