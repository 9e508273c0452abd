"""Thinking as tokens: the phase of an output after each token, and the tokens that end thinking."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ThinkingPhase(Enum):
    """Phase of an output of a model that thinks before it answers."""

    BEFORE = "before"  # no marker was written; thinking may begin
    INSIDE = "inside"
    AFTER = "after"  # thinking has ended, and the answer follows


class ThinkingState(NamedTuple):
    """State after some tokens of an output.

    Args:
        phase: phase of the next token.
        num_tokens: number of thinking tokens so far, markers excluded once they are complete.
        tail: last tokens that may belong to an incomplete marker.
    """

    phase: ThinkingPhase
    num_tokens: int = 0
    tail: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ThinkingTokens:
    """The markers of a model's thinking as token ids.

    Args:
        start_id: marker after which thinking begins.
        end_ids: marker after which thinking has ended.
        close_ids: tokens that end thinking in the middle of a message; they end with `end_ids`.
        boundary_ids: tokens after which a new turn begins; markers before them belong to earlier turns.
        has_headers: True if answers also have a marker, so that nothing before `end_ids` is a part of the answer.
        turn_ids: tokens with which the chat template begins the model's turn; tokens before the last occurrence belong
            to earlier turns. Empty if there are none.
    """

    start_id: int
    end_ids: tuple[int, ...]
    close_ids: tuple[int, ...]
    boundary_ids: frozenset[int] = frozenset()
    has_headers: bool = False
    turn_ids: tuple[int, ...] = ()

    @property
    def all_ids(self) -> tuple[int, ...]:
        """The tokens of all markers, each once."""
        return tuple({self.start_id, *self.end_ids, *self.close_ids})

    def state_after_prompt(self, prompt_ids: Sequence[int]) -> ThinkingState:
        """Return the state at the beginning of the output: the last marker of the last turn decides."""
        phase, begin = ThinkingPhase.BEFORE, 0
        # Backwards: the text after the last marker is short, and a prompt may be long.
        for end in range(len(prompt_ids), 0, -1):
            token_id = prompt_ids[end - 1]
            if token_id == self.end_ids[-1] and _is_before(prompt_ids, end, self.end_ids):
                return ThinkingState(ThinkingPhase.AFTER)
            is_turn = self.turn_ids[-1:] == (token_id,) and _is_before(prompt_ids, end, self.turn_ids)
            if is_turn or token_id in self.boundary_ids:
                begin = end
                break
            if token_id == self.start_id:
                phase, begin = ThinkingPhase.INSIDE, end
                break
        return ThinkingState(phase, 0, tuple(prompt_ids[begin:])[-self._longest :])

    @property
    def _longest(self) -> int:
        """Length of the longest marker."""
        return max(len(self.close_ids), len(self.end_ids))

    def advance(self, state: ThinkingState, token_id: int) -> ThinkingState:
        """Return the state after one more token."""
        phase, num_tokens, tail = state
        if phase is ThinkingPhase.AFTER:
            return state
        tail = (*tail, token_id)[-self._longest :]
        if _ends_with(tail, self.end_ids) and (phase is ThinkingPhase.INSIDE or self.has_headers):
            length = len(self.close_ids if _ends_with(tail, self.close_ids) else self.end_ids)
            return ThinkingState(ThinkingPhase.AFTER, max(num_tokens + 1 - length, 0))
        if phase is ThinkingPhase.INSIDE:
            return ThinkingState(phase, num_tokens + 1, tail)
        if token_id == self.start_id:
            return ThinkingState(ThinkingPhase.INSIDE)
        return ThinkingState(phase, 0, tail)

    def advance_all(self, state: ThinkingState, token_ids: Iterable[int]) -> ThinkingState:
        """Return the state after several tokens."""
        for token_id in token_ids:
            if state.phase is ThinkingPhase.AFTER:
                break
            state = self.advance(state, token_id)
        return state

    def closing_ids(self, state: ThinkingState) -> tuple[int, ...]:
        """Return the tokens that end thinking from a state inside thinking; an incomplete marker is completed."""
        for marker in (self.end_ids, self.close_ids):
            for length in range(len(marker) - 1, 0, -1):
                if _ends_with(state.tail, marker[:length]):
                    return marker[length:]
        return self.close_ids


def _is_before(token_ids: Sequence[int], end: int, marker: tuple[int, ...]) -> bool:
    """Return whether the tokens before a position are a marker."""
    return tuple(token_ids[max(end - len(marker), 0) : end]) == marker


def _ends_with(tail: tuple[int, ...], marker: tuple[int, ...]) -> bool:
    return tail[-len(marker) :] == marker
