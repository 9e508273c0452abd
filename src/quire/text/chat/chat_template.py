"""A model's chat template, which renders a conversation as a prompt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Final

from quire.errors import MAX_SHOWN, InvalidParameter, RequestError, UnsupportedFeature, renamed
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.chat.content_forms import NOWHERE, STRING, texts_of
from quire.text.chat.messages import SANITIZE, Message, normalise_messages, read_conversation
from quire.text.chat.rendering import Renderer, TemplateText, TemplateVariables
from quire.text.chat.template_environment import GLOBALS
from quire.text.chat.trials import TemplateTrial
from quire.text.vocabulary.control_tokens import AddedTokens

logger = logging.getLogger(__name__)

# Names come from clients, so the number of warnings is limited.
MAX_WARNINGS = 32
# A text that no conversation has by chance; it ends the final message where that is to be continued.
END_MARK = "[[end-of-the-message-to-continue]]"
# A message of a conversation that only shows how a template goes on behind it.
PROBE = "The fox?"
# The name of a warning that is given once.
CONTROL_TEXTS: Final = "control texts"
RESERVED = GLOBALS | {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class ChatTemplate:
    """A model's chat template.

    The template comes with the model's folder, never from a request. It is compiled and rendered in a process of
    limited time and memory, which starts at the first use. Thread-safe.

    Args:
        source: the Jinja template.
        tool_source: template for conversations with tools; None if `source` serves them too.
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
        self._warned: set[str] = set()
        self._renderer = renderer or Renderer()
        self._special_tokens = {**(special_tokens or {}), "bos_token": bos_token, "eos_token": eos_token}
        # Programs give the same source with each conversation.
        self.with_source = lru_cache(maxsize=4)(self._with_source)
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

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        """Render a conversation as a text, special tokens included; takes the arguments of `prompt`."""
        return self.prompt(messages, **options).text

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        added_tokens: AddedTokens | None = None,
        sanitizing: str = "always",
        max_images: int = 0,
    ) -> ChatPrompt:
        """Render a conversation as a prompt.

        Args:
            messages: conversation in the form of `normalise_messages`.
            add_generation_prompt: True if the prompt ends with the beginning of the assistant's next message; None
                is True unless the final message is continued.
            continue_final_message: True if the prompt ends with the content of the final message, for the model to
                continue.
            tools: definitions of the functions that the model may call, as JSON schemas.
            variables: variables of this model's template, for example `{"enable_thinking": False}`.
            added_tokens: added tokens of the model, some of which texts of clients may not become; None allows all.
            sanitizing: messages whose texts may not become control tokens; see `sanitize_control_tokens` of
                `ModelConfig`.
            max_images: maximum number of images; 0 for a model that reads none.

        Raises:
            InvalidParameter: a message is malformed, the conversation is too long or has too many images, or a value is
                not JSON.
            UnsupportedFeature: content that the model does not read, that the template does not write for a role, or a
                variable that it does not use.
            RequestError: the template cannot be compiled, refuses the conversation, fails, or exceeds a limit.
            WorkerError: the process that renders does not start, or was closed.
        """
        if tools and self.for_tools is not self:
            return self.for_tools.prompt(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                variables=variables,
                added_tokens=added_tokens,
                sanitizing=sanitizing,
                max_images=max_images,
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidParameter("continue_final_message", True, "false with add_generation_prompt")
        normal, images = read_conversation(messages, self._forms, max_images)
        sanitized = _sanitized(messages, sanitizing)
        self._require_roles(normal)
        if continue_final_message:
            _mark_end(normal)
        begins = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        # Templates test whether tools and documents are none, so both are always defined.
        fixed = {**self._special_tokens, "add_generation_prompt": begins, "tools": None, "documents": None}
        request_variables = self._given(tools, variables or {})
        conversation = TemplateVariables(normal, request_variables, fixed, sanitized, sanitizing != "on-request")
        control = None if added_tokens is None else added_tokens.control_tokens(self._text.literals)
        try:
            rendered = self._renderer.render(
                self.source, conversation, self._clock(), None if control is None else control.marked
            )
        except (TypeError, ValueError, RecursionError) as error:
            allowed = f"messages, tools and variables that JSON can hold ({error})"
            raise InvalidParameter("chat_template_kwargs", variables, allowed) from error
        text, marked = rendered.text, None
        if control is not None and rendered.has_marks:
            text, marked = control.marks.remove(rendered.text), rendered.text
        if rendered.is_other and self._warn_once(CONTROL_TEXTS):
            logger.warning("the model's chat template writes something else where texts have parts of control tokens")
        if continue_final_message:
            text = _cut_at_mark(text)
            marked = None if marked is None else marked[: len(text)]
        return ChatPrompt(text, marked, control, images)

    def _given(self, tools: Sequence[Mapping[str, Any]] | None, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables that a request sets."""
        request_variables: dict[str, Any] = {}
        if tools:
            self.require_tools()
            request_variables["tools"] = [dict(tool) for tool in tools]
        for name, value in variables.items():
            if name in RESERVED or name in self._special_tokens:
                raise InvalidParameter("chat_template_kwargs", name, "names that are not reserved")
            self._require(name)
            request_variables[name] = value
        return request_variables

    def used_variables(
        self, variables: Mapping[str, Any], hints: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Return the variables that the template uses or that `render` refuses; log each other variable once.

        Clients send switches such as `enable_thinking` to models of all kinds.

        Args:
            variables: variables by name.
            hints: alternative names of one switch, some of which the template may use; `variables` override them.
        """
        used = {name: value for name, value in hints.items() if name in self._variables}
        unused = [] if used else list(hints)[:1]
        for name, value in variables.items():
            if name in self._variables or name in RESERVED or name in self._special_tokens:
                used[name] = value
            else:
                unused.append(name)
        for name in unused:
            if self._warn_once(name):
                logger.warning("the model's chat template does not use %r; it is ignored", name[:MAX_SHOWN])
        return used

    def _with_source(self, source: str) -> ChatTemplate:
        """Return another template with this one's special tokens and processes."""
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
        """True if the template uses tools; False if it does not, or cannot be compiled."""
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

    @cached_property
    def turn_header(self) -> str:
        """The text that the template writes between the last message and the model's; "" if it writes none."""
        conversation = [{"role": "user", "content": PROBE}]
        try:
            prompt = self.render(conversation, add_generation_prompt=True)
            before = self.render(conversation, add_generation_prompt=False)
        except RequestError:
            return ""
        # Some templates do not look at `add_generation_prompt`.
        is_longer = prompt != before and prompt.startswith(before)
        return prompt.removeprefix(before) if is_longer else prompt.rpartition(PROBE)[2]

    def try_all(self, trials: Sequence[TemplateTrial]) -> list[str | None]:
        """Return the texts of conversations; None for each that the template refuses.

        All together have the limits of one conversation: a template that exceeds them refuses all.
        """
        variables = [
            {**self._special_tokens, **trial.variables(), "messages": normalise_messages(trial.messages, self._forms)}
            for trial in trials
        ]
        try:
            return self._renderer.try_all(self.source, variables)
        except RequestError:
            return [None] * len(trials)

    @property
    def literals(self) -> str:
        """The literal texts in the template, one a line; "" if it cannot be compiled."""
        try:
            return "\n".join(self._text.literals)
        except RequestError:
            return ""

    def close(self) -> None:
        """End the processes that render."""
        self._renderer.close()

    @cached_property
    def _text(self) -> TemplateText:
        """The names that the template reads, and its literals."""
        return self._renderer.read(self.source)

    @property
    def _variables(self) -> frozenset[str]:
        return self._text.names

    @cached_property
    def _forms(self) -> Mapping[str, str]:
        """The form in which the template reads the content of each role; roles that are absent have strings."""
        try:
            return self._renderer.find_forms(self.source, {**self._special_tokens, "documents": None})
        except RequestError:
            return {}

    def _require_roles(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Check that the template writes the content of each message."""
        for idx, message in enumerate(messages):
            if message["content"] and self._forms.get(message["role"], STRING) == NOWHERE:
                why = f"the model's chat template does not write content of the role {message['role']}"
                raise UnsupportedFeature(f"messages[{idx}].content", why)

    def _warn_once(self, name: str) -> bool:
        """Return True if a name has had no warning yet, and record it; False also after `MAX_WARNINGS`."""
        if name in self._warned or len(self._warned) >= MAX_WARNINGS:
            return False
        self._warned.add(name)
        return True

    def _require(self, name: str) -> None:
        if name not in self._variables:
            raise UnsupportedFeature(name[:MAX_SHOWN], "the model's chat template does not use it")


def _sanitized(messages: Sequence[Message], sanitizing: str) -> list[bool]:
    """Return for each message whether its texts may not become control tokens."""
    sanitized = []
    for idx, message in enumerate(messages):
        wish = message.get(SANITIZE)
        if not isinstance(wish, bool | None) or (wish is False and sanitizing == "always"):
            allowed = "true or absent, since this engine sanitizes all messages" if wish is False else "true or false"
            raise InvalidParameter(f"messages[{idx}].{SANITIZE}", wish, allowed)
        sanitized.append(sanitizing != "on-request" if wish is None else wish)
    return sanitized


def _mark_end(messages: list[dict[str, Any]]) -> None:
    """Append the end mark to the content of the final message, so that a template trims no white space there."""
    final = messages[-1]
    if final["role"] != "assistant" or final.get("tool_calls"):
        allowed = "false unless the final message is the assistant's, without calls"
        raise InvalidParameter("continue_final_message", True, allowed)
    texts = [text for message in messages for text in texts_of(message["content"])]
    if any(END_MARK in text for text in texts):
        raise InvalidParameter("messages", END_MARK, "without this text where continue_final_message is true")
    if isinstance(final["content"], str):
        final["content"] += END_MARK
    else:
        *before, last = final["content"] or [{"type": "text", "text": ""}]
        final["content"] = [*before, {**last, "text": last["text"] + END_MARK}]


def _cut_at_mark(text: str) -> str:
    before, mark, _ = text.rpartition(END_MARK)
    if not mark:
        why = "the model's chat template does not write the final message as it is"
        raise UnsupportedFeature("continue_final_message", why)
    return before


def require_chat_template(template: ChatTemplate | None) -> ChatTemplate:
    """Return a model's template.

    Raises:
        UnsupportedFeature: the model has no chat template.
    """
    if template is None:
        why = "this model has no chat template: set the option chat_template, or send a prompt to complete instead"
        raise UnsupportedFeature("messages", why)
    return template
