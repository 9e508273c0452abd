"""Grammars, compiled by `llguidance`: what masks and forced tokens come from.

Nothing here imports torch: the process that tries grammars out (`quire.structured.compile_sandbox`) runs this too.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from quire.errors import UnsupportedFeature
from quire.sequences.structured import GrammarSource
from quire.structured.grammar_budget import GrammarBudget

# Compiled grammars that are kept although nobody uses them, and what they may have taken when they were compiled.
NUM_CACHED = 32
CACHED_BYTES = 256 << 20
# What one mask, or one look at what is forced, may cost the lexer (some 4 ms); and states that a grammar's lexer may
# come to while outputs go through it, of one or two kilobytes each.
STEP_FUEL = 50_000
MAX_LEXER_STATES = 50_000
# Text that is forced for longer than this is not looked at as tokens yet: that would take long, and other threads wait.
MAX_FORCED_BYTES = 1 << 14
# One space, or a new line with its indentation: enough for how people write JSON, too little to go on for ever.
WHITESPACE = r" |\n[ \t]{0,40}"
NO_TEXT = b"\xff"
# Tokens that `llguidance` looks at as a whole, besides its own choice of them: with words, those masks of texts of
# words that it does not know yet take half the time.
SLICES = ("[A-Za-z]+",)
NO_EXTENSION = "there is no text that it matches and the model can write"


class Grammar:
    """A compiled grammar: the matcher that all others of it are copies of.

    Args:
        matcher: `llguidance`'s, as it is before the first token.
        tokenizer: as `open_tokenizer` gives it.
        budget: the time that its masks may take.
        num_bytes: that compiling it took.
    """

    __slots__ = ("__weakref__", "_matcher", "_tokenizer", "budget", "num_bytes")

    def __init__(self, matcher: Any, tokenizer: Any, budget: GrammarBudget, num_bytes: int = 0) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self.budget = budget
        self.num_bytes = num_bytes

    def open(self) -> Any:
        """Return a matcher of its own, before its first token; it costs a few microseconds."""
        return self._matcher.deep_copy()

    def forced(self, matcher: Any) -> tuple[int, ...]:
        """Return the tokens that must come next; none where there is a choice, or what is forced is very long.

        Where what must be written has the letters of a special token, the tokenizer gives that token, which is no text
        to a matcher, and may even end the output. Such a text is cut into other tokens.

        Args:
            matcher: one that was opened here.
        """
        # Bytes come much faster than tokens, and both while the interpreter is held.
        if not 0 < len(matcher.compute_ff_bytes()) <= MAX_FORCED_BYTES:
            return ()
        tokens: list[int] = matcher.compute_ff_tokens()
        if any(map(self._tokenizer.is_special_token, tokens)) and matcher.validate_tokens(tokens) < len(tokens):
            # A byte that no text has stands before tokens that the grammar names itself.
            text, _, _ = matcher.compute_ff_bytes().partition(NO_TEXT)
            tokens = self._tokenizer.greedy_tokenize(text.decode("utf-8", "ignore"))
        return tuple(tokens)


class GrammarCache:
    """The compiled grammars of one model; may be asked by several threads.

    A grammar stays as long as somebody holds it, and the last few that were asked for stay longer: `NUM_CACHED` at most,
    and no more than take `CACHED_BYTES` together.

    Args:
        read_tokenizer: returns the tokenizer as the text of a `tokenizer.json`; called when the first grammar comes.
        vocab_size: V of the logits, ids without a token included.
        end_token_ids: tokens that may stand where the grammar is complete; at least one.
    """

    def __init__(self, read_tokenizer: Callable[[], str], vocab_size: int, end_token_ids: Sequence[int]) -> None:
        self.read_tokenizer = read_tokenizer
        self.vocab_size = vocab_size
        self.end_token_ids = tuple(end_token_ids)
        self._tokenizer: Any = None
        self._lock = threading.Lock()
        self._known: WeakValueDictionary[GrammarSource, Grammar] = WeakValueDictionary()
        self._recent: OrderedDict[GrammarSource, Grammar] = OrderedDict()

    def find(self, source: GrammarSource) -> Grammar | None:
        """Return a grammar that is compiled already."""
        with self._lock:
            return self._touch(source, self._known.get(source))

    def compile(self, source: GrammarSource, num_bytes: int = 0) -> Grammar:
        """Return a grammar, compiled where it is not known.

        Args:
            source: the grammar.
            num_bytes: that compiling it takes, as far as is known.

        Raises:
            ValueError: it does not compile; the message says why.
            UnsupportedFeature: `llguidance` is not installed, or cannot read the tokenizer.
        """
        known = self.find(source)
        if known is not None:
            return known
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = open_tokenizer(self.read_tokenizer(), self.vocab_size, self.end_token_ids)
        # Without the lock: who wants another grammar does not wait for this one.
        matcher = compile_grammar(self._tokenizer, source)
        grammar = Grammar(matcher, self._tokenizer, GrammarBudget(self.vocab_size), num_bytes)
        with self._lock:
            return self._touch(source, self._known.setdefault(source, grammar)) or grammar

    def _touch(self, source: GrammarSource, grammar: Grammar | None) -> Grammar | None:
        """Keep a grammar that was asked for, in place of those that were asked for the longest ago."""
        recent = self._recent
        if grammar is not None:
            recent[source] = grammar
            recent.move_to_end(source)
            while len(recent) > NUM_CACHED or sum(one.num_bytes for one in recent.values()) > CACHED_BYTES:
                recent.popitem(last=False)
        return grammar


def open_tokenizer(text: str, vocab_size: int, end_token_ids: Sequence[int]) -> Any:
    """Return a tokenizer as `llguidance` has it; a second of work for a large vocabulary.

    Args:
        text: of a `tokenizer.json`.
        vocab_size: V of the logits.
        end_token_ids: the first is the one that `llguidance` writes of itself.

    Raises:
        UnsupportedFeature: `llguidance` is not installed, or cannot read the tokenizer.
    """
    llguidance = import_llguidance()
    try:
        slices = [*llguidance.LLTokenizer.general_slices(), *SLICES]
        return llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_token_ids), slices=slices)
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedFeature("structured_outputs", f"the model's tokenizer cannot be used ({error})") from error


def compile_grammar(tokenizer: Any, source: GrammarSource) -> Any:
    """Return a matcher of a grammar, before its first token.

    Args:
        tokenizer: as `open_tokenizer` gives it.
        source: the grammar.

    Raises:
        ValueError: it does not compile, or allows no first token; the message says why.
    """
    llguidance = import_llguidance()
    limits = llguidance.LLParserLimits(
        step_lexer_fuel=STEP_FUEL, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
    )
    matcher = llguidance.LLMatcher(tokenizer, _definition(llguidance, source), log_level=0, limits=limits)
    if not matcher.is_error():
        # What is worked out for a first mask is there for all others; and whether there is one shows.
        matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(why(matcher))
    return matcher


def why(matcher: Any) -> str:
    """Return a matcher's error, without the state of its parser."""
    text: str = matcher.get_error()
    if text.startswith("NoExtension"):
        return NO_EXTENSION
    text = text.partition("<state>")[0].replace("<non-verbose/>", "")
    return " ".join(text.split())[:400] or "no reason is known"


def import_llguidance() -> ModuleType:
    """Import `llguidance`.

    Raises:
        UnsupportedFeature: it is not installed.
    """
    try:
        return import_module("llguidance")
    except ImportError as error:
        raise UnsupportedFeature(
            "structured_outputs", f"it needs the package llguidance ({error}): pip install 'quire[structured]'"
        ) from error


def _definition(llguidance: ModuleType, source: GrammarSource) -> str:
    """Return a grammar as `llguidance` reads it.

    Raises:
        ValueError: a schema that is not JSON.
    """
    kind, text, has_whitespace = source
    make = llguidance.LLMatcher
    if kind == "json":
        overrides = {"whitespace_pattern": WHITESPACE} if has_whitespace else {"whitespace_flexible": False}
        definition = make.grammar_from_json_schema(text, overrides=overrides)
    elif kind == "regex":
        definition = make.grammar_from_regex(text)
    elif kind == "choice":
        # One terminal for all of them: alternatives of a rule would each be a state of the parser.
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        definition = make.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    else:
        definition = make.grammar_from_lark(text)
    return str(definition)
