"""Thinking before a grammar: the grammar applies after the end of thinking, which a token budget may force.

The classes have the interfaces of `Grammar` and of `llguidance`'s matcher, so that `GrammarState` advances, rolls back
and forks in the same way with and without thinking.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from typing import Any

from quire.sequences.thinking import ThinkingPhase, ThinkingState, ThinkingTokens
from quire.text.structured.compiled_grammar import Grammar
from quire.text.structured.grammar_budget import GrammarBudget


class ThinkingGrammar:
    """A grammar, or any text, after thinking, for the outputs of one prompt."""

    def __init__(
        self,
        tokens: ThinkingTokens,
        max_tokens: int | None,
        start: ThinkingState,
        grammar: Grammar | None,
        mask: bytes,
    ) -> None:
        self.tokens = tokens
        self.start = start
        self.grammar = grammar
        self.mask = mask
        self._max_tokens = max_tokens
        self.budget = GrammarBudget(8 * len(mask)) if grammar is None else grammar.budget

    def open(self) -> ThinkingMatcher:
        """Return a matcher before the first token."""
        return ThinkingMatcher(self, None if self.grammar is None else self.grammar.open())

    def forced(self, matcher: ThinkingMatcher) -> tuple[int, ...]:
        """Return the tokens that must come next; none if there is a choice."""
        state = matcher.state
        if state.phase is ThinkingPhase.AFTER:
            return () if self.grammar is None else self.grammar.forced(matcher.inner)
        return self.closing(state)

    def closing(self, state: ThinkingState) -> tuple[int, ...]:
        """Return the tokens that end thinking if its budget is used up, else none."""
        is_used_up = self._max_tokens is not None and state.num_tokens >= self._max_tokens
        return self.tokens.closing_ids(state) if is_used_up and state.phase is ThinkingPhase.INSIDE else ()


class ThinkingMatcher:
    """The matcher of one output, with the methods of `llguidance`'s matcher.

    Before thinking, the next token is the marker that begins thinking, or a token that the grammar allows.
    """

    def __init__(self, grammar: ThinkingGrammar, inner: Any) -> None:
        self.inner = inner
        self._grammar = grammar
        # The states before the first token and after each token, and whether the inner matcher has consumed each token.
        self._states = [grammar.start]
        self._is_inner: list[bool] = []

    @property
    def state(self) -> ThinkingState:
        """The state after the tokens so far."""
        return self._states[-1]

    @property
    def _has_choice(self) -> bool:
        """True if the next token may be the marker that begins thinking, or the answer's first token."""
        is_before = self.state.phase is ThinkingPhase.BEFORE
        return is_before and self.inner is not None and not self._grammar.tokens.has_headers

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        """Consume tokens before the first one that is not allowed; return the number consumed."""
        for num_taken, token_id in enumerate(token_ids):
            if not self._consume(token_id):
                return num_taken
        return len(token_ids)

    def _consume(self, token_id: int) -> bool:
        state, tokens = self.state, self._grammar.tokens
        is_inner = state.phase is ThinkingPhase.AFTER or (self._has_choice and token_id != tokens.start_id)
        if is_inner:
            if self.inner is not None and self.inner.try_consume_tokens([token_id]) != 1:
                return False
            state = ThinkingState(ThinkingPhase.AFTER, state.num_tokens)
        else:
            forced = self._grammar.closing(state)
            if forced and forced[0] != token_id:
                return False
            state = tokens.advance(state, token_id)
        self._states.append(state)
        self._is_inner.append(is_inner)
        return True

    def rollback(self, num_tokens: int) -> bool:
        """Remove the last tokens; return False if the inner matcher cannot."""
        num_inner = sum(self._is_inner[-num_tokens:])
        del self._states[-num_tokens:], self._is_inner[-num_tokens:]
        return self.inner is None or not num_inner or bool(self.inner.rollback(num_inner))

    def deep_copy(self) -> ThinkingMatcher:
        """Return an independent copy."""
        twin = copy(self)
        twin.inner = None if self.inner is None else self.inner.deep_copy()
        twin._states, twin._is_inner = self._states.copy(), self._is_inner.copy()
        return twin

    def is_stopped(self) -> bool:
        """Return whether the answer is complete."""
        return self.inner is not None and bool(self.inner.is_stopped())

    def is_error(self) -> bool:
        """Return whether the inner matcher has failed."""
        return self.inner is not None and bool(self.inner.is_error())

    def get_error(self) -> str:
        """Return the error of the inner matcher."""
        return "" if self.inner is None else str(self.inner.get_error())

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        """Write the bitmask of the allowed tokens, without regard to forced tokens."""
        if self.inner is not None and (self._has_choice or self.state.phase is ThinkingPhase.AFTER):
            self.inner.unsafe_compute_mask_ptr(pointer, num_bytes)
            if self._has_choice:
                start_id = self._grammar.tokens.start_id
                byte = ctypes.c_uint8.from_address(pointer + (start_id >> 3))
                byte.value |= 1 << (start_id & 7)
        else:
            ctypes.memmove(pointer, self._grammar.mask, num_bytes)


def bitmask_without(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """Return the bitmask of all tokens of a vocabulary except some."""
    bits = (1 << vocab_size) - 1
    for token_id in token_ids:
        bits &= ~(1 << token_id)
    return bits.to_bytes(-(-vocab_size // 32) * 4, "little")
