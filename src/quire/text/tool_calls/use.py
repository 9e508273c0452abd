"""What a request says about calls, made for one model: how it is told of tools, held to their schemas, and read."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.structured import StructuredOutputs
from quire.text.chat_template import require_chat_template
from quire.text.tokenizer import Tokenizer
from quire.text.tool_calls.grammar import CallRules, text_tokens
from quire.text.tool_calls.parser import ToolFormat
from quire.text.tool_calls.tools import read_choice, read_tools

ONE_GRAMMAR = 'an output has one grammar, that of its tools; set tool_choice to "none"'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request says about calls.

    Args:
        told: the tools, as templates read them.
        rules: which of them may be called, and how.
        form: how the model writes calls.
        is_named: the client named the one function to be called.
        is_forced: the output is held to the rules.
        kept_ids: special tokens that belong to calls and must be in the text.
    """

    told: Sequence[Mapping[str, Any]]
    rules: CallRules
    form: ToolFormat
    is_named: bool
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


@dataclass(frozen=True, slots=True)
class ToolModel:
    """What of a model matters for calls.

    Args:
        tokenizer: None where token ids are all that is known of tokens.
        form: how the model writes calls; None where that is not known.
        vocab_size: token ids lie below.
        set_form: how users say the format where the template does not show it.
    """

    tokenizer: Tokenizer | None
    form: ToolFormat | None
    vocab_size: int
    set_form: str

    def read(self, tools: object, tool_choice: object, parallel_tool_calls: object) -> ToolUse | None:
        """Read a request's fields of these names; None leaves one out.

        Returns:
            None where no calls are wanted.

        Raises:
            InvalidParameter: naming the field.
            UnsupportedFeature: the model knows no tools, or calls are required where llguidance is missing.
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
            why = 'calls can be required where llguidance is installed: pip install "quire[structured]"'
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
        kept_ids = tuple(token_id for token_id in tokens.values() if token_id in tokenizer.special_ids)
        return ToolUse([tool.told for tool in known], rules, form, choice.is_named, can_force, kept_ids)

    def _require(self) -> tuple[Tokenizer, ToolFormat]:
        """Return what calls need.

        Raises:
            UnsupportedFeature: the template has no place for tools, or does not say how calls are written.
        """
        if self.tokenizer is None:
            raise UnsupportedFeature("tools", "this engine runs without a tokenizer")
        require_chat_template(self.tokenizer.chat_template).require_tools()
        if self.form is None:
            why = f"the model's chat template does not say how calls are written; {self.set_form} can"
            raise UnsupportedFeature("tools", why)
        return self.tokenizer, self.form
