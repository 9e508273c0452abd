"""A request's use of tools with one model: definitions in the prompt, constrained output, and parsed calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.config.hints import allowed_parsers, find_parser
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.structured import StructuredOutputs
from quire.text.chat_template import require_chat_template
from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls.formats import FORMATS, choose_format
from quire.text.tool_calls.grammar import CallRules, calls_or_answer, text_tokens
from quire.text.tool_calls.parser import ToolFormat
from quire.text.tool_calls.tools import read_choice, read_tools


@dataclass(frozen=True, slots=True)
class ToolUse:
    """A request's use of tools.

    Args:
        definitions: definitions of the tools for the chat template.
        rules: the allowed calls.
        form: format of the model's calls.
        is_named: True where the client named the one function of the one call.
        is_forced: True where a grammar constrains the output to the rules.
        marker_ids: ids of special tokens that belong to calls and must be in the text.
    """

    definitions: Sequence[Mapping[str, Any]]
    rules: CallRules
    form: ToolFormat
    is_named: bool
    is_forced: bool
    marker_ids: tuple[int, ...]

    def sampling(self, answer: StructuredOutputs | None, thinking_token_budget: int | None) -> dict[str, Any]:
        """Return the sampling parameters that calls need.

        Args:
            answer: structure of an output without calls; None for any text.
            thinking_token_budget: maximum number of thinking tokens; None for any number.

        Raises:
            InvalidParameter: the grammar is too large.
            UnsupportedFeature: the structure is a grammar, or the grammar of the calls has the thinking, which a budget
                would end.
        """
        has_thinking = self.is_forced and bool(self.form.answer_head)
        if has_thinking and thinking_token_budget is not None:
            why = "this model's calls come before its thinking ends; leave the budget out beside tools"
            raise UnsupportedFeature("thinking_token_budget", why)
        params: dict[str, Any] = {"kept_special_ids": self.marker_ids}
        if self.is_forced:
            try:
                if answer is None or self.rules.is_required:
                    text = self.form.grammar(self.rules)
                else:
                    calls = self.form.grammar(replace(self.rules, is_required=True))
                    text = calls_or_answer(calls, answer, self.form.answer_head)
                params["structured_outputs"] = StructuredOutputs(grammar=text)
                if has_thinking:
                    params["thinking"] = None
            except (InvalidParameter, RecursionError) as error:
                raise InvalidParameter("tools", f"{len(self.definitions)} tools", f"smaller ({error})") from error
        return params


@dataclass(frozen=True, slots=True)
class ToolModel:
    """The properties of a model that tool calls depend on.

    Args:
        tokenizer: the model's tokenizer, None where the engine runs without one.
        form: format of the model's calls, None where it is not known.
        vocab_size: upper bound of the token ids.
        set_form: name of the option that sets the format where the template does not show it.
    """

    tokenizer: Tokenizer | None
    form: ToolFormat | None
    vocab_size: int
    set_form: str

    @classmethod
    def find(cls, name: str, tokenizer: Tokenizer | None, vocab_size: int) -> ToolModel:
        """Return a model's properties, with the format that the argument `tool_call_parser` of `LLM.chat` names.

        Args:
            name: a format of `FORMATS`, or vLLM's name for one; "auto" for the one in the chat template.
            tokenizer: the model's tokenizer.
            vocab_size: upper bound of the token ids.

        Raises:
            InvalidParameter: no such format.
        """
        known, option = ("auto", *FORMATS), "tool_call_parser"
        found = find_parser(option, name, known)
        if found is None:
            raise InvalidParameter(option, name, allowed_parsers(option, known))
        template = None if tokenizer is None else tokenizer.chat_template
        form = None if template is None else choose_format(found, template.for_tools.source)
        return cls(tokenizer, form, vocab_size, option)

    def read(self, tools: object, tool_choice: object, parallel_tool_calls: object) -> ToolUse | None:
        """Read the fields of a request with the names of the arguments; None is an absent field.

        Returns:
            The use of tools, None where calls are not requested.

        Raises:
            InvalidParameter: naming the field.
            UnsupportedFeature: the model does not support tools, or calls are required and llguidance is missing.
        """
        known = read_tools(tools)
        if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
            raise InvalidParameter("parallel_tool_calls", parallel_tool_calls, "true or false")
        choice = read_choice(tool_choice, [tool.function for tool in known])
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
        definitions = [tool.definition for tool in known]
        return ToolUse(definitions, rules, form, choice.is_named, can_force, marker_ids)

    def _require(self) -> tuple[Tokenizer, ToolFormat]:
        """Return the tokenizer and the format, which calls need.

        Raises:
            UnsupportedFeature: the template does not use tools, or the format is not known.
        """
        if self.tokenizer is None:
            raise UnsupportedFeature("tools", "this engine runs without a tokenizer")
        require_chat_template(self.tokenizer.chat_template).require_tools()
        if self.form is None:
            why = f"the model's chat template does not show the format of calls; {self.set_form} can set it"
            raise UnsupportedFeature("tools", why)
        return self.tokenizer, self.form
