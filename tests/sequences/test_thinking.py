"""Thinking as tokens, against searches in whole texts: a token is a letter here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sequences.thinking import ThinkingPhase, ThinkingState, ThinkingTokens

BEFORE, INSIDE, AFTER = ThinkingPhase.BEFORE, ThinkingPhase.INSIDE, ThinkingPhase.AFTER


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


TAGS = ThinkingTokens(ord("("), ids(")"), ids(".)"), frozenset(ids("|")))
# The same without ends of turns, which begin with "<>".
TURNS = ThinkingTokens(ord("("), ids(")"), ids(".)"), turn_ids=ids("<>"))
# Channels: "c" and "m" begin and end a header, "f" is the final channel, "e" and "s" end and begin a message.
CHANNELS = ThinkingTokens(ord("m"), ids("cfm"), ids("escfm"), frozenset(ids("s")), has_headers=True)


def after(tokens: ThinkingTokens, text: str) -> ThinkingState:
    return tokens.advance_all(ThinkingState(BEFORE), ids(text))


@pytest.mark.parametrize(
    ("tokens", "text", "phase", "num_tokens"),
    [
        (TAGS, "", BEFORE, 0),
        (TAGS, "(", INSIDE, 0),
        (TAGS, "(ab", INSIDE, 2),
        (TAGS, "(ab)", AFTER, 2),
        (TAGS, "(ab.)", AFTER, 2),
        (TAGS, ")ab(c", INSIDE, 1),
        (TAGS, "()xyz(", AFTER, 0),
        (CHANNELS, "cf", BEFORE, 0),
        (CHANNELS, "cfm", AFTER, 0),
        (CHANNELS, "camxyz", INSIDE, 3),
        (CHANNELS, "camxyzescfmno", AFTER, 3),
        (CHANNELS, "camxescamyescfm", AFTER, 7),
    ],
)
def test_phases_and_counts(tokens: ThinkingTokens, text: str, phase: ThinkingPhase, num_tokens: int) -> None:
    state = after(tokens, text)
    assert (state.phase, state.num_tokens) == (phase, num_tokens)


@pytest.mark.parametrize(
    ("tokens", "prompt", "phase"),
    [
        (TAGS, "u|a(", INSIDE),
        (TAGS, "u|a()", AFTER),
        (TAGS, "u|a()(", INSIDE),
        (TAGS, "u|a)b", AFTER),
        (TAGS, "u(|a", BEFORE),
        (TAGS, "(x)|", BEFORE),
        (TAGS, "", BEFORE),
        (CHANNELS, "scfmxesa", BEFORE),
        (CHANNELS, "sacam", INSIDE),
        (CHANNELS, "sacfm", AFTER),
        (CHANNELS, "m", INSIDE),
        (TURNS, "u(a<>", BEFORE),
        (TURNS, "u)a<>", BEFORE),
        (TURNS, "u<>a(b<>", BEFORE),
        (TURNS, "u)<>(", INSIDE),
        (TURNS, "u(<>()", AFTER),
        (TURNS, "u<>a(b>", INSIDE),
        (TURNS, ">(", INSIDE),
    ],
)
def test_the_last_turn_of_the_prompt_decides(tokens: ThinkingTokens, prompt: str, phase: ThinkingPhase) -> None:
    state = tokens.state_after_prompt(ids(prompt))
    assert (state.phase, state.num_tokens) == (phase, 0)


def test_a_marker_that_the_prompt_begins_is_completed_by_the_output() -> None:
    state = CHANNELS.state_after_prompt(ids("sac"))
    assert CHANNELS.advance_all(state, ids("fmxyz")) == ThinkingState(AFTER)
    assert CHANNELS.advance_all(state, ids("amxyz"))[:2] == (INSIDE, 3)


@given(st.sampled_from([TAGS, CHANNELS]), st.text("()|.cfmesx", max_size=20))
def test_closing_tokens_end_thinking_from_everywhere(tokens: ThinkingTokens, text: str) -> None:
    state = after(tokens, text)
    if state.phase is not INSIDE:
        return
    closing = tokens.closing_ids(state)
    for idx, token_id in enumerate(closing):
        assert state.phase is INSIDE
        assert tokens.closing_ids(state) == closing[idx:]
        state = tokens.advance(state, token_id)
    assert state.phase is AFTER
    assert closing in [marker[-len(closing) :] for marker in (tokens.end_ids, tokens.close_ids)]


@given(st.text("()|.x", max_size=20))
def test_a_text_search_finds_the_same_phase(text: str) -> None:
    begin = text.find("(")
    end = text.find(")", begin) if begin >= 0 else -1
    phase = BEFORE if begin < 0 else INSIDE if end < 0 else AFTER
    assert after(TAGS, text).phase is phase
