"""Tools of Responses: functions, functions in namespaces and custom tools, all of which are functions for the model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from quire.errors import InvalidParameter, UnsupportedFeature, shown
from quire.server.protocols.chat_protocols import arguments_object, read_list, read_object, required_text
from quire.server.requests.fields import Fields, warn_once

FUNCTION: Final = "function"
CUSTOM: Final = "custom"
# Tools that OpenAI's servers run; dated versions of them have a suffix.
HOSTED: Final = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
    "programmatic_tool_calling",
)
NO_TOOL: Final = "is no tool of this server, only functions, custom tools and namespaces of these are"
NOT_HERE: Final = "runs on OpenAI's servers; only functions and custom tools can be chosen"
# The parameter that has the input of a custom tool.
INPUT: Final = "input"
MAX_NAME: Final = 64
NO_NAME_CHARS: Final = re.compile(r"[^a-zA-Z0-9_-]")
# The name of a tool in a chat, and the part of it that an error may name.
TOOL: Final = re.compile(r"^(tool_choice\.allowed_tools\.)?tools\[\d+\](\.function\.parameters)?")
PARAMETERS: Final = ".function.parameters"
ALLOWED: Final = "tool_choice.allowed_tools"


class CalledTool(NamedTuple):
    """A tool whose call a response gives back.

    Args:
        kind: `FUNCTION` or `CUSTOM`.
        name: the client's name of it.
        namespace: the namespace of the name, None without one.
    """

    kind: str
    name: str
    namespace: str | None = None

    def item(self, call_id: str) -> dict[str, Any]:
        """Return the item of a call that begins."""
        kind, value = ("function_call", "arguments") if self.kind == FUNCTION else ("custom_tool_call", INPUT)
        item = {"type": kind, "call_id": call_id, "name": self.name, value: ""}
        return item if self.namespace is None else item | {"namespace": self.namespace}


class ResponseTools:
    """The tools of one request.

    Args:
        value: the field `tools`.
        choice: the field `tool_choice`.

    Attributes:
        functions: the tools in the form of a chat; None if there is no such field.
        choice: the choice in the form of a chat.
    """

    def __init__(self, value: object, choice: object) -> None:
        self.functions: list[dict[str, Any]] | None = None
        self._called: dict[str, CalledTool] = {}
        # The client's names of fields, by those of the chat.
        self._names: dict[str, str] = {}
        if value is not None:
            self._read_all(value)
        self.choice = self._read_choice(choice) if isinstance(choice, dict) else choice

    def called(self, name: str) -> CalledTool:
        """Return the tool of a function that the model has called."""
        return self._called.get(name) or CalledTool(FUNCTION, name)

    def rename(self, field: str) -> str:
        """Return the client's name of a field of a tool."""
        match = TOOL.match(field)
        if match is None:
            return field
        known = next((name for name in (match[0], match[0].removesuffix(PARAMETERS)) if name in self._names), "")
        return self._names.get(known, known) + field.removeprefix(known)

    def _read_all(self, value: object) -> None:
        if not isinstance(value, list):
            raise InvalidParameter("tools", value, "a list of tools")
        self.functions = []
        for idx, item in enumerate(value):
            self._read(read_object(item, f"tools[{idx}]"))

    def _read(self, tool: Fields) -> None:
        kind = tool.get("type")
        if kind == "namespace":
            namespace, about = required_text(tool, "name"), tool.text("description")
            for idx, item in enumerate(read_list(tool.get("tools"), tool.name("tools"), "tools")):
                inner = read_object(item, f"{tool.name('tools')}[{idx}]")
                # The description of the namespace is said once, before that of its first tool.
                self._add(inner, namespace, about if idx == 0 else None)
        elif (hosted := hosted_tool(kind)) is not None:
            warn_once(f"tool {hosted}", "left out the tool %r: it runs on OpenAI's servers", hosted)
        else:
            self._add(tool)

    def _add(self, tool: Fields, namespace: str | None = None, about: str | None = None) -> None:
        kind, where = tool.get("type"), tool.name("")[:-1]
        if kind not in (FUNCTION, CUSTOM):
            raise UnsupportedFeature(tool.name("type"), f"{shown(kind)} {NO_TOOL}")
        name, index = tool.get("name"), f"tools[{len(self.functions or ())}]"
        function = {field: tool.get(field) for field in ("name", "description", "strict", "parameters")}
        self._names[index] = where
        if kind == CUSTOM:
            self._names[index + PARAMETERS] = f"{where}.format"
            function |= _custom_function(tool)
        if isinstance(name, str):  # the reader of the chat refuses anything else
            function["name"] = flat_name(name, namespace)
            self._called[function["name"]] = CalledTool(kind, name, namespace)
        if about is not None and isinstance(function["description"] or "", str):
            function["description"] = "\n\n".join(text for text in (about, function["description"]) if text)
        assert self.functions is not None
        self.functions.append({"type": "function", "function": function})

    def _read_choice(self, choice: Mapping[str, Any]) -> object:
        kind, listed = choice.get("type"), choice.get("tools")
        if hosted_tool(kind) is not None:
            raise UnsupportedFeature("tool_choice.type", f"{shown(kind)} {NOT_HERE}")
        if kind != "allowed_tools":
            return _choice_of(choice)
        if isinstance(listed, list):
            kept = [
                idx
                for idx, item in enumerate(listed)
                if not isinstance(item, dict) or hosted_tool(item.get("type")) is None
            ]
            if listed and not kept:
                if choice.get("mode") == "auto":
                    return "none"
                raise UnsupportedFeature("tool_choice.tools", f"each of them {NOT_HERE}")
            self._names |= {f"{ALLOWED}.tools[{idx}]": f"tool_choice.tools[{place}]" for idx, place in enumerate(kept)}
            listed = [_choice_of(item) if isinstance(item := listed[place], dict) else item for place in kept]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function for the model, which depends on these two alone."""
    if namespace is None:
        return name
    flat = NO_NAME_CHARS.sub("_", f"{namespace.rstrip('_')}__{name}")
    if len(flat) <= MAX_NAME:
        return flat
    digest = hashlib.sha256(f"{namespace}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{flat[: MAX_NAME - 9]}_{digest}"


def hosted_tool(kind: object) -> str | None:
    """Return the tool of OpenAI's servers of which a type is a version; None if it is no such type."""
    if not isinstance(kind, str):
        return None
    return next((name for name in HOSTED if kind == name or kind.startswith((f"{name}_2", f"{name}_preview"))), None)


def custom_arguments(text: str) -> str:
    """Return the arguments of the function that is a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool in the arguments of its function; "" if they were cut off."""
    text = (arguments_object(arguments) or {}).get(INPUT)
    return text if isinstance(text, str) else ""


def _choice_of(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a chosen tool in the form of a chat; other values are unchanged."""
    kind, name, namespace = (choice.get(field) for field in ("type", "name", "namespace"))
    if kind not in (FUNCTION, CUSTOM):
        return choice
    if isinstance(name, str) and isinstance(namespace, str | None):
        name = flat_name(name, namespace)
    return {"type": "function", "function": {"name": name}}


def _custom_function(tool: Fields) -> dict[str, Any]:
    """Return the fields of the function that is a custom tool: its one parameter is the input."""
    about, form = tool.text("description") or "", tool.object("format")
    schema: dict[str, Any] = {"type": "string"}
    kind = None if form is None else form.get("type")
    if form is not None and kind == "grammar":
        syntax, definition = form.get("syntax"), required_text(form, "definition")
        if syntax == "regex":
            schema["pattern"] = f"^(?:{definition})$"
        elif syntax == "lark":
            # Nothing enforces a grammar of what is inside a string of JSON, so the model is told of it.
            about = f"{about}\n\nThe input follows this grammar (Lark):\n{definition}".strip()
        else:
            raise InvalidParameter(form.name("syntax"), syntax, '"lark" or "regex"')
    elif kind not in (None, "text"):
        assert form is not None
        raise InvalidParameter(form.name("type"), kind, '"text" or "grammar"')
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return {"description": about, "strict": True, "parameters": parameters}
