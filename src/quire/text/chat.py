"""Renders a conversation into the prompt that a model was trained on, in a sandbox with bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.errors import InvalidParameter, RequestError, UnsupportedFeature

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
MAX_INPUT_CHARS = 1 << 23
MAX_OUTPUT_CHARS = 1 << 24
MAX_LOOP_STEPS = 1_000_000
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "strftime_now"})

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template.

    The template comes with the model's folder, never from a request; the sandbox and the bounds keep a hostile or
    broken one away from the process, and bound its loops and its output. It is compiled at its first use.

    Args:
        source: the Jinja template.
        tool_source: another one for conversations with tools; None where `source` serves them too.
        bos_token: the token that begins a text, or "".
        eos_token: the token that ends a text, or "".
        special_tokens: further special tokens by name, for example `{"pad_token": "<pad>"}`.
        clock: what templates that write a date take the time from.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: Mapping[str, str] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._clock = clock
        self._special_tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        # What conversations with tools are written with.
        self.for_tools = self
        if tool_source is not None:
            self.for_tools = ChatTemplate(
                tool_source, bos_token=bos_token, eos_token=eos_token, special_tokens=special_tokens, clock=clock
            )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Write a conversation as a prompt; special tokens are in it already.

        Args:
            messages: see `normalise_messages`.
            add_generation_prompt: end with what begins the assistant's next message.
            tools: functions that the model may call, as JSON schemas.
            **kwargs: variables of this model's template, for example `enable_thinking`.

        Raises:
            InvalidParameter: a malformed message, or a conversation out of bounds.
            UnsupportedFeature: content that is not text, or a variable that the template does not use.
            RequestError: the template refuses the conversation, fails, or writes too much.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs)
        template = self._template
        variables: dict[str, Any] = {"messages": normalise_messages(messages), **self._special_tokens}
        # Templates ask whether tools and documents are none, so they are always there.
        variables |= {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None}
        if tools:
            self.require_tools()
            variables["tools"] = [dict(tool) for tool in tools]
        for name, value in kwargs.items():
            if name in RESERVED or name in self._special_tokens or name in template.environment.globals:
                raise InvalidParameter("chat_template_kwargs", name, "names that are not reserved")
            self._require(name)
            variables[name] = value
        variables["range"] = _range_with_budget(MAX_LOOP_STEPS)
        pieces: list[str] = []
        room = MAX_OUTPUT_CHARS
        try:
            for piece in template.generate(variables):
                room -= len(piece)
                if room < 0:
                    raise RequestError(f"the rendered chat is longer than {MAX_OUTPUT_CHARS} characters")
                pieces.append(piece)
        except RequestError:
            raise
        except Exception as error:  # a template can raise whatever Python can
            why = f"the model's chat template refuses this conversation: {error}"
            raise RequestError(why, field="messages") from error
        return "".join(pieces)

    @property
    def knows_tools(self) -> bool:
        """True where the template has a place for tools; one that cannot be compiled has none."""
        try:
            return "tools" in self.for_tools._variables
        except RequestError:
            return False

    def require_tools(self) -> None:
        """Check that the template has a place for tools.

        Raises:
            UnsupportedFeature: it has none.
            RequestError: it cannot be compiled.
        """
        self.for_tools._require("tools")

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise _broken(error) from error

    @cached_property
    def _variables(self) -> set[str]:
        """The names that the template reads."""
        try:
            return jinja2.meta.find_undeclared_variables(self._environment.parse(self.source))
        except jinja2.TemplateError as error:
            raise _broken(error) from error

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        # A product is the one operator that makes something huge from something small.
        environment.intercepted_binops = frozenset({"*", "**"})
        environment.binop_table = {**environment.binop_table, "*": _bounded_product, "**": _refuse_power}
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: self._clock().strftime(form)
        return environment

    def _require(self, name: str) -> None:
        if name not in self._variables:
            raise UnsupportedFeature(name, "the model's chat template does not use it")


def _broken(error: jinja2.TemplateError) -> RequestError:
    return RequestError(f"the model's chat template cannot be compiled: {error}")


def require_chat_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return a model's template, or say that there is none.

    Raises:
        UnsupportedFeature: the model has no chat template.
    """
    if template is None:
        raise UnsupportedFeature("messages", "this model has no chat template; send a prompt to complete instead")
    return template


def normalise_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Check a conversation and bring it into the form that templates read.

    Content becomes one string (a list of text parts is joined, an absent one is ""), the role `developer` becomes
    `system`, and the arguments of tool calls become objects. Fields that templates do not read are left out.

    Raises:
        InvalidParameter: naming the message and the field.
        UnsupportedFeature: parts that are not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidParameter("messages", messages, "a list of messages")
    if not 0 < len(messages) <= MAX_MESSAGES:
        raise InvalidParameter("messages", f"{len(messages)} messages", f"from 1 to {MAX_MESSAGES} messages")
    normal = [_normalise(message, f"messages[{idx}]") for idx, message in enumerate(messages)]
    num_chars = sum(len(message["content"]) for message in normal)
    if num_chars > MAX_INPUT_CHARS:
        raise InvalidParameter("messages", f"{num_chars} characters", f"at most {MAX_INPUT_CHARS} characters")
    return normal


def _normalise(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidParameter(where, message, "an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise InvalidParameter(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise UnsupportedFeature(f"{where}.{name}", "use content and tool_calls")
    calls = message.get("tool_calls") or None
    if calls is not None and role != "assistant":
        raise InvalidParameter(f"{where}.tool_calls", calls, "absent unless the role is assistant")
    normal: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(message.get("content"), f"{where}.content", may_be_absent=calls is not None),
    }
    if calls is not None:
        normal["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise InvalidParameter(f"{where}.{name}", value, "a string")
            normal[name] = value
    return normal


def _text(content: object, where: str, *, may_be_absent: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_absent:
        return ""
    if not isinstance(content, list | tuple):
        raise InvalidParameter(where, content, "a string or a list of text parts")
    texts = []
    for idx, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind is None:
            raise InvalidParameter(f"{where}[{idx}]", part, 'an object like {"type": "text", "text": "..."}')
        if kind != "text":
            raise UnsupportedFeature(f"{where}[{idx}].type", f"parts of type {kind!r} cannot be read, only text")
        if not isinstance(part.get("text"), str):
            raise InvalidParameter(f"{where}[{idx}].text", part.get("text"), "a string")
        texts.append(part["text"])
    return "".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidParameter(where, calls, "a list of tool calls")
    normal = []
    for idx, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidParameter(f"{where}[{idx}]", call, "an object with a function and its name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, Mapping):
            raise InvalidParameter(f"{where}[{idx}].function.arguments", function["arguments"], "a JSON object")
        named = {"name": function["name"], "arguments": dict(arguments)}
        normal.append({"id": call.get("id"), "type": "function", "function": named})
    return normal


class _GenerationBlock(Extension):
    """Lets `{% generation %}` through, which marks the assistant's words for training and writes nothing itself."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as models read it: without the escapes that a web page needs."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateRuntimeError(message)


def _range_with_budget(num_steps: int) -> Callable[..., range]:
    """Return a `range` whose results have at most `num_steps` elements, all calls together."""
    left = num_steps

    def bounded_range(*bounds: int) -> range:
        nonlocal left
        steps = range(*bounds)
        left -= max(len(steps), 1)
        if left < 0:
            raise jinja2.TemplateRuntimeError(f"it loops more than {num_steps} times")
        return steps

    return bounded_range


def _bounded_product(left: Any, right: Any) -> Any:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int) and len(many) * times > MAX_OUTPUT_CHARS:
            raise jinja2.TemplateRuntimeError("it makes a value that is too large")
    return left * right


def _refuse_power(left: Any, right: Any) -> NoReturn:
    raise jinja2.TemplateRuntimeError(f"powers are not allowed ({left!r} ** {right!r})")
