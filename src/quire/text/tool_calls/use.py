"""A request's use of tools with one model: definitions in the prompt, constrained output, and parsed calls."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config.hints import find_parser
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.structured import StructuredOutputs
from quire.text.chat.chat_template import require_chat_template
from quire.text.structured.compiled_grammar import WANTED
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tool_calls.detection import choose_format
from quire.text.tool_calls.formats import FORMATS
from quire.text.tool_calls.grammar import CallRules, calls_or_answer, text_tokens
from quire.text.tool_calls.parser import ToolFormat
from quire.text.tool_calls.tools import read_choice, read_tools

# Message of the grammar compiler: number of the line, reason, and text of the lines around it.
COMPILE_ERROR = re.compile(
    r"compiles: at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \| .*)?$", re.DOTALL
)
# The names of a function's rules contain its number.
FUNCTION_RULE = re.compile(r"(?:args_|[fF])(\d+)")
# Beginning of the rule of an answer in `calls_or_answer`.
ANSWER = "answer: "


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's use of tools.

    Args:
        definitions: definitions of the tools for the chat template.
        rules: the allowed calls.
        form: format of the model's calls.
        is_named: True if the client named the function of a single call.
        is_forced: True if a grammar constrains the output to the rules.
        marker_ids: ids of special tokens that belong to calls and must stay in the text.
        num_earlier_calls: number of calls in the conversation so far, with which some models write the ids of calls.
    """

    definitions: Sequence[Mapping[str, Any]]
    rules: CallRules
    form: ToolFormat
    is_named: bool
    is_forced: bool
    marker_ids: tuple[int, ...]
    num_earlier_calls: int = 0

    def after(self, messages: object) -> ToolUse:
        """Return the use in a conversation whose messages, which need not be valid, come before the output."""
        return replace(self, num_earlier_calls=_num_calls(messages))

    def sampling(self, answer: StructuredOutputs | None, thinking_token_budget: int | None) -> dict[str, Any]:
        """Return the sampling parameters that calls need."""
        has_thinking = self.is_forced and bool(self.form.answer_head)
        if has_thinking and thinking_token_budget is not None:
            why = "this model's calls come before its thinking ends; leave the budget out beside tools"
            raise UnsupportedFeature("thinking_token_budget", why)
        params: dict[str, Any] = {"kept_special_ids": self.marker_ids}
        if self.is_forced:
            try:
                text = self._grammar(answer)
            except RecursionError as error:
                raise InvalidParameter("tools", self._shown, f"nested less deeply ({error})") from error
            try:
                params["structured_outputs"] = StructuredOutputs(grammar=text)
            except InvalidParameter as error:
                raise InvalidParameter("tools", self._shown, f"smaller ({error})") from error
            if has_thinking:
                params["thinking"] = None
        return params

    def explain(
        self, error: InvalidParameter, grammar: str, answer: StructuredOutputs | None = None
    ) -> InvalidParameter:
        """Return the error of a grammar that does not compile, with the field and value that the client sent."""
        if error.field != "structured_outputs.grammar" or not self.is_forced:
            return error
        match = COMPILE_ERROR.search(error.allowed)
        why = error.allowed.partition(": ")[2] if match is None else match[2]
        line = "" if match is None else "".join(grammar.split("\n")[int(match[1]) - 1 : int(match[1])])
        rule = FUNCTION_RULE.match(line)
        if rule is not None and int(rule[1]) < len(self.rules.functions):
            function = self.rules.functions[int(rule[1])]
            return InvalidParameter(function.field, function.parameters, f"a JSON schema that compiles: {why}")
        if answer is not None and line.startswith(ANSWER):
            kind, text = answer.source.kind, answer.source.text
            return InvalidParameter(answer.field, text, f"{WANTED[kind]} that compiles: {why}")
        return InvalidParameter("tools", self._shown, f"definitions whose grammar compiles: {why}")

    @property
    def _shown(self) -> str:
        """The tools as a value in error messages."""
        return f"{len(self.definitions)} tools"

    def _grammar(self, answer: StructuredOutputs | None) -> str:
        if answer is None or self.rules.is_required:
            return self.form.grammar(self.rules)
        calls = self.form.grammar(replace(self.rules, is_required=True))
        return calls_or_answer(calls, answer, self.form.answer_head)


@dataclass(frozen=True, slots=True)
class ToolModel:
    """The properties of a model on which tool calls depend.

    Args:
        tokenizer: the model's tokenizer; None if the engine runs without one.
        form: format of the model's calls; None if it is not known.
        vocab_size: upper bound of the token ids.
        set_form: name of the option that sets the format if the template does not show it.
    """

    tokenizer: Tokenizer | None
    form: ToolFormat | None
    vocab_size: int
    set_form: str

    @classmethod
    def find(cls, name: str, tokenizer: Tokenizer | None, vocab_size: int) -> ToolModel:
        """Return a model's properties; `name` is the value of `tool_call_parser`, such as "auto".

        Args:
            name: a format of `FORMATS`, or vLLM's name for one; "auto" for the one in the chat template.
            tokenizer: the model's tokenizer.
            vocab_size: upper bound of the token ids.

        Raises:
            InvalidParameter: no such format.
        """
        option = "tool_call_parser"
        parser = find_parser(option, name, ("auto", *FORMATS))
        template = None if tokenizer is None else tokenizer.chat_template
        form = None if template is None else choose_format(parser, template).form
        return cls(tokenizer, form, vocab_size, option)

    def read(self, tools: object, tool_choice: object, parallel_tool_calls: object) -> ToolUse | None:
        """Parse the fields of a request with the names of the arguments; return None if no function may be called.

        Returns:
            The use of tools, None where calls are not requested.

        Raises:
            InvalidParameter: naming the field.
            UnsupportedFeature: the model does not support tools, or calls are required and llguidance is missing.
        """
        parsed_tools = read_tools(tools)
        if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
            raise InvalidParameter("parallel_tool_calls", parallel_tool_calls, "true or false")
        choice = read_choice(tool_choice, [tool.function for tool in parsed_tools])
        if not choice.functions:
            return None
        tokenizer, form = self._require()
        can_force = importlib.util.find_spec("llguidance") is not None
        if choice.is_required and not can_force:
            why = "calls can be required where llguidance is installed: pip install llguidance"
            raise UnsupportedFeature("tool_choice", why)
        markers = (form.marker, *form.other_markers)
        tokens = {marker: tokenizer.added_ids[marker] for marker in markers if marker in tokenizer.added_ids}
        rules = CallRules(
            functions=choice.functions,
            is_required=choice.is_required,
            is_parallel=parallel_tool_calls is not False and not choice.is_named,
            tokens=tokens,
            text_tokens=text_tokens(tokenizer, form.marker, self.vocab_size),
        )
        marker_ids = tuple(token_id for token_id in tokens.values() if token_id in tokenizer.special_ids)
        definitions = [tool.definition for tool in parsed_tools]
        return ToolUse(definitions, rules, form, choice.is_named, can_force, marker_ids)

    def _require(self) -> tuple[Tokenizer, ToolFormat]:
        """Return the tokenizer and the format; raise an error if one is missing or the template does not use tools."""
        if self.tokenizer is None:
            raise UnsupportedFeature("tools", "this engine runs without a tokenizer")
        require_chat_template(self.tokenizer.chat_template).require_tools()
        if self.form is None:
            why = f"the model's chat template does not show the format of calls; {self.set_form} can set it"
            raise UnsupportedFeature("tools", why)
        return self.tokenizer, self.form


def _num_calls(messages: object) -> int:
    """Return the number of calls in the assistant's messages."""
    if not isinstance(messages, list | tuple):
        return 0
    calls = [message.get("tool_calls") for message in messages if isinstance(message, Mapping)]
    return sum(len(one) for one in calls if isinstance(one, list | tuple))
