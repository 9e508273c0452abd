"""A model's chat template, which renders a conversation as a prompt."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from quire.errors import MAX_SHOWN, InvalidParameter, RequestError, UnsupportedFeature, renamed
from quire.text.messages import Message, normalise_messages
from quire.text.rendering import GLOBALS, Renderer
from quire.text.written_calls import writes_no_calls, written_calls

logger = logging.getLogger(__name__)

# Names come from clients, so the number of warnings is limited.
MAX_WARNINGS = 32
# A text that no conversation has by chance; it ends the final message where that is to be continued.
END_MARK = "[[end-of-the-message-to-continue]]"
# Templates that expect no content beside calls test for it so; DeepSeek's leave calls beside "" out.
CONTENT_IS_NONE = re.compile(r"message(\.content|\[['\"]content['\"]\]) is (not )?none")
RESERVED = GLOBALS | {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class TemplateParts(NamedTuple):
    """Parts of a chat template; the fields are the arguments of `ChatTemplate`, and `special_tokens` has all."""

    source: str
    tool_source: str | None
    special_tokens: dict[str, str]


class ChatTemplate:
    """A model's chat template.

    The template comes with the model's folder, never from a request. It is compiled and rendered in a process of
    limited time and memory, which starts at the first use. Thread-safe.

    Args:
        source: the Jinja template.
        tool_source: template for conversations with tools; None where `source` serves them too.
        bos_token: token that begins a text, or "".
        eos_token: token that ends a text, or "".
        special_tokens: further special tokens by name, for example `{"pad_token": "<pad>"}`.
        clock: source of the time, for templates that write a date.
        renderer: renderer of the template; None makes one with the default limits.
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
        renderer: Renderer | None = None,
    ) -> None:
        self.source = source
        self._clock = clock
        self._unused: set[str] = set()
        self._renderer = renderer or Renderer()
        self._special_tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        # The template of conversations with tools.
        self.for_tools = self
        if tool_source is not None:
            self.for_tools = ChatTemplate(
                tool_source,
                bos_token=bos_token,
                eos_token=eos_token,
                special_tokens=special_tokens,
                clock=clock,
                renderer=self._renderer,
            )

    @property
    def parts(self) -> TemplateParts:
        """Parts of which another process makes the same template."""
        return TemplateParts(
            self.source, None if self.for_tools is self else self.for_tools.source, dict(self._special_tokens)
        )

    @classmethod
    def from_parts(cls, parts: TemplateParts) -> ChatTemplate:
        """Return the template of the parts of another one."""
        named = dict(parts.special_tokens)
        begin, end = named.pop("bos_token", ""), named.pop("eos_token", "")
        return cls(parts.source, tool_source=parts.tool_source, bos_token=begin, eos_token=end, special_tokens=named)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as a prompt, special tokens included.

        Args:
            messages: conversation in the form of `normalise_messages`.
            add_generation_prompt: True where the prompt ends with the beginning of the assistant's next message; None
                is True unless the final message is continued.
            continue_final_message: True where the prompt ends with the content of the final message, for the model to
                continue.
            tools: definitions of the functions that the model may call, as JSON schemas.
            variables: variables of this model's template, for example `{"enable_thinking": False}`.

        Raises:
            InvalidParameter: a message is malformed, the conversation is too long, or a value is not JSON.
            UnsupportedFeature: content is not text, or the template does not use a variable.
            RequestError: the template cannot be compiled, refuses the conversation, fails, or exceeds a limit.
            WorkerError: the process that renders does not start, or was closed.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=variables,
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidParameter("continue_final_message", True, "false with add_generation_prompt")
        normal = self._with_calls(normalise_messages(messages))
        if continue_final_message:
            _mark_end(normal)
        context: dict[str, Any] = {"messages": normal, **self._special_tokens}
        # Templates test whether tools and documents are none, so both are always defined.
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        context |= {"add_generation_prompt": begins, "tools": None, "documents": None}
        if tools:
            self.require_tools()
            context["tools"] = [dict(tool) for tool in tools]
        for name, value in (variables or {}).items():
            if name in RESERVED or name in self._special_tokens:
                raise InvalidParameter("chat_template_kwargs", name, "names that are not reserved")
            self._require(name)
            context[name] = value
        try:
            text = self._renderer.render(self.source, context, self._clock())
            return _cut_at_mark(text) if continue_final_message else text
        except (TypeError, ValueError, RecursionError) as error:
            allowed = f"messages, tools and variables that JSON can hold ({error})"
            raise InvalidParameter("chat_template_kwargs", variables, allowed) from error

    def _with_calls(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages with their calls as the template expects them."""
        is_none, is_written = CONTENT_IS_NONE.search(self.source) is not None, writes_no_calls(self.source)
        for message in messages:
            if is_none and "tool_calls" in message and not message["content"]:
                message["content"] = None
            elif is_written and "tool_calls" in message:
                message["content"] = written_calls(message.pop("tool_calls")) + message["content"]
        return messages

    def used_variables(self, variables: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that the template uses, or that `render` refuses; each other one is warned of once.

        Clients send switches such as `enable_thinking` to models of all kinds.

        Args:
            variables: variables by name.
            hints: variables of one meaning, of which a template uses some; `variables` override them.
        """
        used = {name: value for name, value in hints.items() if name in self._variables}
        unused = [] if used else list(hints)[:1]
        for name, value in variables.items():
            if name in self._variables or name in RESERVED or name in self._special_tokens:
                used[name] = value
            else:
                unused.append(name)
        for name in unused:
            if name not in self._unused and len(self._unused) < MAX_WARNINGS:
                self._unused.add(name)
                logger.warning("the model's chat template does not use %r; it is ignored", name[:MAX_SHOWN])
        return used

    def with_source(self, source: str) -> ChatTemplate:
        """Return another template with this one's special tokens and processes.

        Raises:
            RequestError: it cannot be compiled; the error's field is `chat_template`.
            WorkerError: the process that compiles does not start.
        """
        tokens = dict(self._special_tokens)
        bos, eos = tokens.pop("bos_token"), tokens.pop("eos_token")
        template = ChatTemplate(
            source, bos_token=bos, eos_token=eos, special_tokens=tokens, clock=self._clock, renderer=self._renderer
        )
        try:
            _ = template._variables
        except RequestError as error:
            raise renamed(error, "chat_template") from None
        return template

    @property
    def supports_tools(self) -> bool:
        """True where the template uses tools; False where it cannot be compiled."""
        try:
            return "tools" in self.for_tools._variables
        except RequestError:
            return False

    def require_tools(self) -> None:
        """Check that the template uses tools.

        Raises:
            UnsupportedFeature: it does not.
            RequestError: it cannot be compiled.
        """
        self.for_tools._require("tools")

    def close(self) -> None:
        """End the processes that render."""
        self._renderer.close()

    @cached_property
    def _variables(self) -> frozenset[str]:
        """The names that the template reads."""
        return self._renderer.names(self.source)

    def _require(self, name: str) -> None:
        if name not in self._variables:
            raise UnsupportedFeature(name[:MAX_SHOWN], "the model's chat template does not use it")


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Put the mark behind the content of the final message; a template may trim white space, but not before a mark."""
    final = messages[-1]
    if final["role"] != "assistant" or final.get("tool_calls"):
        allowed = "false unless the final message is the assistant's, without calls"
        raise InvalidParameter("continue_final_message", True, allowed)
    if any(END_MARK in (message["content"] or "") for message in messages):
        raise InvalidParameter("messages", END_MARK, "without this text where continue_final_message is true")
    final["content"] += END_MARK


def _cut_at_mark(text: str) -> str:
    before, mark, _ = text.rpartition(END_MARK)
    if not mark:
        why = "the model's chat template does not write the final message as it is"
        raise UnsupportedFeature("continue_final_message", why)
    return before


def require_chat_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return a model's template where it has one.

    Raises:
        UnsupportedFeature: the model has no chat template.
    """
    if template is None:
        why = "this model has no chat template: set the option chat_template, or send a prompt to complete instead"
        raise UnsupportedFeature("messages", why)
    return template
