"""Grammars compiled by `llguidance`, the source of masks and forced tokens.

This module imports no torch, since the processes of `compile_sandbox` and `grammar_server` run it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from types import ModuleType
from typing import Any

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.structured import OR_ELSE, GrammarSource, StructuredOutputs, lark_literal
from quire.text.schemas.as_json import enforceable
from quire.text.structured import gbnf
from quire.text.structured.grammar_budget import GrammarBudget

# Limit of the lexer's work for one mask, or one query of forced bytes (some 4 ms); and limit of the lexer states of a
# grammar, of one or two kilobytes each.
STEP_FUEL = 50_000
MAX_LEXER_STATES = 50_000
# A longer forced text is not tokenized, since other threads would wait; its tokens are sampled until it is shorter.
MAX_FORCED_BYTES = 1 << 14
# One space, or a new line with its indentation: enough for common JSON, and bounded.
WHITESPACE = r" |\n[ \t]{0,40}"
NO_TEXT = b"\xff"
# Additional token classes whose masks `llguidance` precomputes: with words, new masks of texts of words take half the
# time.
SLICES = ("[A-Za-z]+",)
# Parts of an error: a quoted line with its number, and the position.
SOURCE_LINE = re.compile(r" \d+ \| ")
ERROR_LINE = re.compile(r"at (\d+)\(\d+\):")
# Parts of an error in an expression: the expression, a mark below its wrong part, and the reason.
REGEX_ERROR = re.compile(
    r"regex parse error:\n(?:    (?P<quoted>[^\n]*)\n    (?P<margin> *)\^)?.*?\nerror: (?P<reason>[^\n]+)", re.DOTALL
)
WANTED = {
    "json": "a JSON schema",
    "regex": "a regular expression",
    "choice": "choices",
    "grammar": "a grammar in Lark or GBNF",
}
NO_EXTENSION = "there is no text that it matches and the model can write"

logger = logging.getLogger(__name__)


class Grammar:
    """A compiled grammar: its initial matcher, which each sequence copies, and its time budget."""

    __slots__ = ("__weakref__", "_matcher", "_tokenizer", "budget")

    def __init__(self, matcher: Any, tokenizer: Any, budget: GrammarBudget) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self.budget = budget

    def open(self) -> Any:
        """Return a copy of the initial matcher; it costs a few microseconds."""
        return self._matcher.deep_copy()

    def forced(self, matcher: Any) -> tuple[int, ...]:
        """Return the tokens that must come next; none if there is a choice, or the forced text is very long.

        If the forced text spells a special token, the tokenizer returns this token, which a matcher does not accept as
        text, and which may even end the output. Such a text is encoded with other tokens.
        """
        # Bytes are computed much faster than tokens, and both hold the interpreter lock.
        if not 0 < len(matcher.compute_ff_bytes()) <= MAX_FORCED_BYTES:
            return ()
        tokens: list[int] = matcher.compute_ff_tokens()
        if any(map(self._tokenizer.is_special_token, tokens)) and matcher.validate_tokens(tokens) < len(tokens):
            # Special tokens that the grammar names explicitly come after a byte that no text contains.
            text, _, _ = matcher.compute_ff_bytes().partition(NO_TEXT)
            tokens = self._tokenizer.greedy_tokenize(text.decode("utf-8", "ignore"))
        return tuple(tokens)


def open_tokenizer(text: str, vocab_size: int, end_token_ids: Sequence[int]) -> Any:
    """Return a tokenizer of `llguidance`; takes a second for a large vocabulary."""
    llguidance = import_llguidance()
    try:
        slices = [*llguidance.LLTokenizer.general_slices(), *SLICES]
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_token_ids), slices=slices)
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedFeature("structured_outputs", f"the model's tokenizer cannot be used ({error})") from error


def compile_grammar(tokenizer: Any, source: GrammarSource, *, is_trial: bool = False) -> Any:
    """Return a matcher of a grammar, before its first token.

    A rule that does not compile is replaced by the looser rule after `OR_ELSE` in its line, if any, with a warning.
    """
    llguidance = import_llguidance()
    limits = llguidance.LLParserLimits(
        step_lexer_fuel=STEP_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
    while True:
        matcher = llguidance.LLMatcher(tokenizer, _definition(llguidance, source), log_level=0, limits=limits)
        # `llguidance` never finishes a mask if a terminal that matches no text follows another terminal.
        error = matcher.get_error() if matcher.is_error() else _empty_terminal(source)
        if not error:
            # Copies share the work for the first mask, and a grammar without a first token fails here.
            matcher.compute_bitmask()
            if not matcher.is_error():
                return matcher
            error = matcher.get_error()
        looser = _without_rule(source, error)
        if looser is None:
            raise ValueError(_regex_reason(source.text, error) if source.kind == "regex" else _reason(error))
        if not is_trial:
            reason = SOURCE_LINE.split(_reason(error), maxsplit=1)[0]
            logger.warning("a part of a tool's schema is not enforced, since it does not compile: %s", reason)
        source = looser


@cache
def _byte_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes, to check a single terminal without the cost of a vocabulary."""
    return import_llguidance().LLTokenizer("byte")


def _empty_terminal(source: GrammarSource) -> str:
    """Return an error about a terminal whose intersected expressions match no common text; "" if there is none."""
    if source.kind != "grammar" or OR_ELSE not in source.text:
        return ""
    for number, line in enumerate(source.text.split("\n"), 1):
        rule, separator, _ = line.partition(OR_ELSE)
        name, _, terminal = rule.partition(": ")
        if separator and name.isupper() and " & " in terminal:
            text = f"%llguidance {{}}\nstart: {name}\n{rule}\n"
            alone = import_llguidance().LLMatcher(_byte_tokenizer(), text, log_level=0)
            if not alone.is_error():
                alone.compute_bitmask()
            if alone.is_error() and alone.get_error().startswith("NoExtension"):
                return f"at {number}(1): no text meets {terminal}"
    return ""


def _without_rule(source: GrammarSource, error: str) -> GrammarSource | None:
    """Return a grammar with the looser rule in place of the rule that an error is about; None if there is none."""
    match = ERROR_LINE.match(error)
    lines = source.text.split("\n")
    idx = int(match[1]) - 1 if match is not None and source.kind == "grammar" else len(lines)
    _, _, looser = lines[idx].partition(OR_ELSE) if idx < len(lines) else ("", "", "")
    return source._replace(text="\n".join([*lines[:idx], looser, *lines[idx + 1 :]])) if looser else None


def accepts_beginning(source: GrammarSource, text: str, min_chars: int) -> bool:
    """Return whether a grammar that names no tokens accepts a text, or one of its beginnings.

    Args:
        source: the grammar.
        text: the text.
        min_chars: length of the shortest beginning that counts.

    Raises:
        UnsupportedFeature: the package `llguidance` is missing.
        ValueError: the grammar does not compile.
    """
    matcher = compile_grammar(_byte_tokenizer(), source)
    head, tail = (_byte_tokenizer().tokenize_str(part) for part in (text[:min_chars], text[min_chars:]))
    if matcher.try_consume_tokens(head) < len(head):
        return False
    return bool(matcher.is_accepting()) or any(matcher.is_accepting() for _ in takewhile(matcher.consume_token, tail))


def check_source(wanted: StructuredOutputs) -> None:
    """Refuse a schema or an expression that does not compile, without a model.

    A grammar may name tokens of the model's vocabulary, so it is not checked.

    Raises:
        InvalidParameter: it does not compile.
        UnsupportedFeature: the package `llguidance` is missing.
    """
    if wanted.grammar is None:
        check_installed()
        try:
            compile_grammar(_byte_tokenizer(), wanted.source, is_trial=True)
        except ValueError as error:
            raise refusal(wanted, str(error)) from error


def refusal(wanted: StructuredOutputs, reason: str) -> InvalidParameter:
    """Return the error for a grammar that does not compile."""
    return InvalidParameter(wanted.field, wanted.source.text, f"{WANTED[wanted.source.kind]} that compiles: {reason}")


def why(matcher: Any) -> str:
    """Return a matcher's error message without the parser state."""
    return _reason(matcher.get_error())


def _reason(text: str) -> str:
    if text.startswith("NoExtension"):
        return NO_EXTENSION
    text = text.partition("<state>")[0].replace("<non-verbose/>", "")
    return " ".join(text.split())[:400] or "no reason is known"


def _regex_reason(expression: str, text: str) -> str:
    """Return the error message of an expression without the rule that `llguidance` makes of it."""
    match = REGEX_ERROR.search(text)
    if match is None:
        return _reason(text)
    # The position is that in the quoted expression, whose line feeds and slashes are escaped.
    is_quoted_plain = match["quoted"] == expression
    return match["reason"] + (f" (character {len(match['margin']) + 1})" if is_quoted_plain else "")


def check_installed() -> None:
    """Check that `llguidance` is installed, without importing it."""
    if "llguidance" in sys.modules or find_spec("llguidance") is None:
        import_llguidance()


def import_llguidance() -> ModuleType:
    """Import `llguidance`; a missing package is an `UnsupportedFeature`."""
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise UnsupportedFeature(
            "structured_outputs", f"it needs the package llguidance ({error}): pip install llguidance"
        ) from error


def _definition(llguidance: ModuleType, source: GrammarSource) -> str:
    """Return the definition of a grammar in the format of `llguidance`."""
    kind, text, has_whitespace, is_closed = source
    make = llguidance.LLMatcher
    if kind == "json":
        plain = enforceable(json.loads(text), is_closed=is_closed)
        layout: dict[str, Any] = (
            {"whitespace_pattern": WHITESPACE} if has_whitespace else {"whitespace_flexible": False}
        )
        schema = json.dumps(plain.schema, ensure_ascii=False)
        definition = make.grammar_from_json_schema(schema, overrides=layout | plain.layout)
    elif kind == "regex":
        definition = make.grammar_from_regex(text)
    elif kind == "choice":
        # One terminal for all choices, since each alternative of a rule would be a parser state.
        choices = " | ".join(map(lark_literal, json.loads(text)))
        definition = make.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    else:
        definition = make.grammar_from_lark(gbnf.as_lark(text) if gbnf.is_gbnf(text) else text)
    return str(definition)
