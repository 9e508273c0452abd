"""The tools of a request: which functions the model may call, must call, and how it is held to that."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.structured import StructuredOutputs
from quire.server.fields import Fields
from quire.server.state import ServerState
from quire.server.structured import STRUCTURED_FIELDS
from quire.text.chat import require_chat_template
from quire.text.tool_calls import CallRules, Function, ToolFormat
from quire.text.tool_calls.calls import NAME, NAME_PATTERN
from quire.text.tool_calls.grammar import text_tokens

TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 18
NO_PARAMETERS = {"type": "object", "properties": {}}
CHOICES = '"none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as the model is told of it, and as it may be called.

    Args:
        told: what templates read.
        function: what calls keep to.
    """

    told: Mapping[str, Any]
    function: Function


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about calls.

    Args:
        told: the tools, as templates read them.
        rules: which of them may be called, and how.
        form: how the model writes calls.
        is_forced: the output is held to the rules.
        kept_ids: special tokens that belong to calls and must be in the text.
    """

    told: Sequence[Mapping[str, Any]]
    rules: CallRules
    form: ToolFormat
    is_forced: bool
    kept_ids: tuple[int, ...]

    @property
    def names(self) -> frozenset[str]:
        """The functions that may be called."""
        return frozenset(function.name for function in self.rules.functions)

    def sampling(self) -> dict[str, Any]:
        """Return the sampling parameters that calls need.

        Raises:
            InvalidParameter: the grammar is too large.
        """
        params: dict[str, Any] = {"kept_special_ids": self.kept_ids}
        if self.is_forced:
            try:
                params["structured_outputs"] = StructuredOutputs(grammar=self.form.grammar(self.rules))
            except (InvalidParameter, RecursionError) as error:
                raise InvalidParameter("tools", f"{len(self.told)} tools", f"smaller ({error})") from error
        return params


def read_tool_use(state: ServerState, fields: Fields) -> ToolUse | None:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`.

    Returns:
        None where no calls are wanted.

    Raises:
        RequestError: naming the field.
    """
    tools = read_tools(fields)
    is_parallel = fields.flag("parallel_tool_calls", True)
    is_required, functions = _read_choice(fields, [tool.function for tool in tools])
    if not functions:
        return None
    form = _format_of(state)
    can_force = importlib.util.find_spec("llguidance") is not None
    if is_required and not can_force:
        why = 'calls can be required where llguidance is installed: pip install "quire[structured]"'
        raise UnsupportedFeature("tool_choice", why)
    for name in STRUCTURED_FIELDS:
        if fields.get(name) not in (None, {"type": "text"}):
            raise UnsupportedFeature(name, 'an output has one grammar, that of its tools; set tool_choice to "none"')
    tokenizer = state.llm.tokenizer
    assert tokenizer is not None
    markers = (form.marker, *form.other_markers)
    tokens = {marker: tokenizer.added_ids[marker] for marker in markers if marker in tokenizer.added_ids}
    rules = CallRules(
        functions=functions,
        is_required=is_required,
        is_parallel=is_parallel,
        tokens=tokens,
        text_tokens=text_tokens(tokenizer, form.marker, state.llm.resolved.vocab_size),
    )
    kept_ids = tuple(token_id for token_id in tokens.values() if token_id in tokenizer.special_ids)
    return ToolUse([tool.told for tool in tools], rules, form, can_force, kept_ids)


def read_tools(fields: Fields) -> list[Tool]:
    """Read `tools`.

    Raises:
        InvalidParameter: naming the tool and the field.
    """
    given = fields.get("tools")
    if given is None:
        return []
    if not isinstance(given, list):
        raise InvalidParameter("tools", given, "a list of tools")
    if len(given) > MAX_TOOLS:
        raise InvalidParameter("tools", f"{len(given)} tools", f"at most {MAX_TOOLS} tools")
    try:
        num_chars = len(json.dumps(given, ensure_ascii=False))
    except RecursionError as error:
        raise InvalidParameter("tools", "deeply nested tools", "nested less deeply") from error
    if num_chars > MAX_TOOLS_CHARS:
        raise InvalidParameter("tools", f"{num_chars} characters", f"at most {MAX_TOOLS_CHARS} characters of JSON")
    tools = [_read_tool(tool, f"tools[{idx}]") for idx, tool in enumerate(given)]
    seen: set[str] = set()
    for idx, tool in enumerate(tools):
        if tool.function.name in seen:
            raise InvalidParameter(f"tools[{idx}].function.name", tool.function.name, "a name that no other tool has")
        seen.add(tool.function.name)
    return tools


def _read_tool(value: object, where: str) -> Tool:
    if not isinstance(value, dict):
        raise InvalidParameter(where, value, "an object with type and function")
    tool = Fields(value, f"{where}.")
    if tool.get("type") != "function":
        raise InvalidParameter(tool.name("type"), tool.get("type"), '"function"')
    function = tool.object("function")
    if function is None:
        raise InvalidParameter(tool.name("function"), None, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise InvalidParameter(function.name("name"), name, f"a string that matches ^{NAME}$")
    description, parameters = function.text("description"), function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidParameter(function.name("parameters"), parameters, "a JSON schema, which is an object")
    if parameters is not None and parameters.get("type", "object") != "object":
        kind = parameters["type"]
        raise InvalidParameter(function.name("parameters.type"), kind, '"object", as arguments are one')
    told = {"name": name} | ({} if description is None else {"description": description})
    schema = parameters or {**NO_PARAMETERS, "additionalProperties": False}
    return Tool(
        {"type": "function", "function": {**told, "parameters": parameters or NO_PARAMETERS}},
        Function(name, schema, is_strict=function.flag("strict")),
    )


def _read_choice(fields: Fields, functions: list[Function]) -> tuple[bool, list[Function]]:
    """Return whether there must be a call, and what may be called: nothing where there are no tools, or no call."""
    choice = fields.get("tool_choice")
    if choice in (None, "auto", "none"):
        return False, [] if choice == "none" else functions
    if choice != "required" and not isinstance(choice, dict):
        raise InvalidParameter("tool_choice", choice, CHOICES)
    if choice == "required":
        if not functions:
            raise InvalidParameter("tool_choice", choice, '"none" or "auto" where there are no tools')
        return True, functions
    if choice.get("type") != "function":
        raise InvalidParameter("tool_choice.type", choice.get("type"), '"function"')
    named = Fields(choice, "tool_choice.").object("function")
    name = None if named is None else named.get("name")
    chosen = [function for function in functions if function.name == name]
    if not chosen:
        raise InvalidParameter("tool_choice.function.name", name, "the name of one of the tools")
    return True, chosen


def _format_of(state: ServerState) -> ToolFormat:
    """Return how the model writes calls.

    Raises:
        UnsupportedFeature: its template has no place for tools, or does not say how calls are written.
    """
    tokenizer = state.llm.tokenizer
    if tokenizer is None:
        raise UnsupportedFeature("tools", "this server runs without a tokenizer")
    require_chat_template(tokenizer.chat_template).require_tools()
    if state.tool_format is None:
        why = "the model's chat template does not say how calls are written; --tool-call-parser can"
        raise UnsupportedFeature("tools", why)
    return state.tool_format
