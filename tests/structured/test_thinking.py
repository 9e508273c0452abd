"""Grammars after thinking: every way to a position gives the same masks, and the allowed tokens are those of a twin."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire.sequences.params import SamplingParams
from quire.sequences.structured import StructuredOutputs
from quire.sequences.thinking import ThinkingTokens
from quire.text.structured.grammar_state import GrammarState
from quire.text.structured.state_table import StateTable
from tests.structured.grammar_world import END, NUM_IDS, VOCAB, WANTED, compiled, constraint_of, filled, grammar_state
from tests.structured.grammar_world import new_sequence as with_prompt

START, STOP = VOCAB.index("q"), VOCAB.index("w")
TOKENS = ThinkingTokens(START, (STOP,), (VOCAB.index("v"), STOP))
EVERY = set(range(NUM_IDS))
# A grammar or none, the budget, and the prompt's last token.
KINDS = [
    (name, budget, last)
    for name in ("choice", "compact", None)
    for budget in (0, 3, None)
    for last in (START, STOP, 3)
    if name is not None or budget is not None
]


def state(name: str | None, budget: int | None, last: int) -> GrammarState:
    """Return the state before an output, opened as a step opens it."""
    wanted = None if name is None else StructuredOutputs(**WANTED[name])
    params = SamplingParams(structured_outputs=wanted, thinking=TOKENS, thinking_token_budget=budget)
    first = with_prompt("choice", prompt=(3, last))._replace(params=params)
    return StateTable(compiled, NUM_IDS, (END,)).open(constraint_of(first))


def twin_allowed(name: str | None, budget: int | None, last: int, output: list[int]) -> set[int]:
    """Return the tokens that may come after an output, found by looking at all of it."""
    grammar = None if name is None else grammar_state(name)
    inside: list[int] | None = [] if last == START else None
    answer: list[int] | None = [] if last == STOP else None
    for token_id in output:
        if answer is not None:
            answer.append(token_id)
        elif inside is not None:
            inside.append(token_id)
            answer = [] if token_id == STOP else None
        elif token_id == START:
            inside = []
        elif name is not None:
            answer = [token_id]
    if answer is None and inside is not None:
        if budget is None or len(inside) < budget:
            return EVERY if name is None else EVERY - {END}
        return {STOP} if inside[-1:] == [TOKENS.close_ids[0]] else {TOKENS.close_ids[0]}
    if grammar is None:
        return EVERY
    grammar.sync(0, answer or [])
    (allowed,) = filled(grammar)
    return allowed if answer is not None else allowed | {START}


def walk(kind: tuple[str | None, int | None, int], rng: random.Random, length: int) -> list[int]:
    """Return an output drawn from the twin's tokens; markers are drawn more often than others."""
    output: list[int] = []
    while len(output) < length:
        allowed = twin_allowed(*kind, output)
        markers = sorted(allowed & {START, STOP})
        token_id = rng.choice(markers if markers and rng.random() < 0.3 else sorted(allowed))
        if token_id == END:
            return output
        output.append(token_id)
    return output


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_a_position_allows_what_the_twin_allows(kind: tuple[str | None, int | None, int]) -> None:
    rng = random.Random(str(kind))
    known = state(*kind)
    for _ in range(25):
        wanted = walk(kind, rng, rng.randrange(1, 12))
        same = zip(known.token_ids, wanted, strict=False)
        common = next((idx for idx, (a, b) in enumerate(same) if a != b), 0)
        start = min(common, rng.randrange(len(wanted) + 1))
        known.sync(start, wanted[start:])
        assert (known.error, known.token_ids) == (None, wanted)
        if rng.random() < 0.3:
            known = known.fork(constraint_of(with_prompt("choice", prompt=(3, 3))))
        assert filled(known) == [twin_allowed(*kind, wanted)]


@pytest.mark.parametrize("kind", KINDS)
def test_masks_behind_drafts_are_those_of_drafts_that_came_true(kind: tuple[str | None, int | None, int]) -> None:
    rng = random.Random(str(kind))
    for _ in range(15):
        whole = walk(kind, rng, 10)
        cut = rng.randrange(len(whole) + 1)
        known = state(*kind)
        known.sync(0, whole[:cut])
        draft = [*whole[cut:], rng.randrange(NUM_IDS), rng.randrange(NUM_IDS)]
        expected = []
        for length in range(len(draft) + 1):
            allowed = twin_allowed(*kind, whole[:cut] + draft[:length])
            expected.append(allowed)
            if length == len(draft) or draft[length] not in allowed or draft[length] == END:
                break
        # Behind a draft that writes forced text otherwise there may be masks too; it is not accepted.
        assert filled(known, tuple(draft))[: len(expected)] == expected
        assert known.token_ids == whole[:cut]
        assert filled(known) == expected[:1]
