"""The grammars of one model in one process: their setup, and the compiled grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from quire.errors import CheckpointError, UnsupportedFeature
from quire.platform.bounded.process import RemoteCall
from quire.sequences.structured import GrammarSource
from quire.text.structured.compiled_grammar import Grammar, compile_grammar, open_tokenizer
from quire.text.structured.grammar_budget import GrammarBudget


class GrammarSetup(NamedTuple):
    """The setup of a model's grammars, which any process can open.

    Args:
        tokenizer: call that returns the text of the `tokenizer.json`.
        vocab_size: V of the logits, ids without a token included.
        end_token_ids: tokens that are allowed when a grammar is complete; at least one.
    """

    tokenizer: RemoteCall
    vocab_size: int
    end_token_ids: tuple[int, ...]

    def open_tokenizer(self) -> Any:
        """Return a tokenizer of `llguidance`."""
        try:
            text = self.tokenizer()
        except (CheckpointError, OSError) as error:
            raise UnsupportedFeature("structured_outputs", f"the model's tokenizer cannot be read ({error})") from error
        return open_tokenizer(text, self.vocab_size, self.end_token_ids)


class GrammarModel(NamedTuple):
    """The model whose grammars are opened, possibly in several processes.

    Args:
        tokenizer: function that returns a call for the text of the `tokenizer.json`.
        vocab_size: V of the logits, ids without a token included.
        end_token_ids: tokens that are allowed when a grammar is complete; at least one.
    """

    tokenizer: Callable[[], RemoteCall]
    vocab_size: int
    end_token_ids: tuple[int, ...]

    def setup(self) -> GrammarSetup:
        """Return the setup of the grammars for a new process."""
        return GrammarSetup(self.tokenizer(), self.vocab_size, self.end_token_ids)


class CompiledGrammars:
    """The grammars that are compiled in this process, held by weak references; thread-safe."""

    def __init__(self, setup: GrammarSetup) -> None:
        self._tokenizer = setup.open_tokenizer()
        self._vocab_size = setup.vocab_size
        self._known: WeakValueDictionary[GrammarSource, Grammar] = WeakValueDictionary()

    def find(self, source: GrammarSource) -> Grammar:
        """Return a grammar; compile it if no reference to it exists."""
        cached = self._known.get(source)
        if cached is not None:
            return cached
        grammar = Grammar(compile_grammar(self._tokenizer, source), self._tokenizer, GrammarBudget(self._vocab_size))
        return self._known.setdefault(source, grammar)
