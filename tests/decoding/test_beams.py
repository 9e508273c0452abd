"""Beam search against its slow twin, against all outputs there are, and edit by edit."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp, inf, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.memory import Namespace, TokenChain
from quire.memory.prefix.token_chain import root_of
from quire.sequences import FinishReason, Request, SamplingParams, Sequence
from quire.sequences.beams import BeamSearch, Candidate
from quire.sequences.decoding import Append, BeamEdit, Drop, Finish, Fork, strategy_of
from quire.sequences.decoding.beams import advance_beams, num_candidates
from tests.decoding.beam_twin import Found, Model, Rules, every_output
from tests.decoding.beam_twin import search as search_slowly

PROMPT = [1, 2, 3]


def random_model(seed: int, vocab_size: int, end_weight: float = 1.0) -> Model:
    """Return log probabilities that are a function of the output; the last token is likelier or less likely to come."""

    def model(tokens: tuple[int, ...]) -> list[float]:
        rng = random.Random(repr((seed, tokens)))
        weights = [exp(rng.gauss(0.0, 1.5)) for _ in range(vocab_size)]
        weights[-1] *= end_weight
        return [log(weight / sum(weights)) for weight in weights]

    return model


def request_for(rules: Rules, end_ids: frozenset[int] = frozenset()) -> Request:
    """Return a request with its prompt's sequence."""
    params = SamplingParams(
        beam_width=rules.width, length_penalty=rules.length_penalty, early_stopping=rules.early_stopping
    )
    request = Request(
        request_id="r",
        prompt_token_ids=PROMPT,
        params=params,
        max_total_tokens=len(PROMPT) + rules.max_tokens,
        end_token_ids=end_ids,
        arrival=0,
        seed=0,
    )
    request.search = BeamSearch()
    request.sequences.append(sequence_of(request, 0, PROMPT.copy()))
    return request


def sequence_of(request: Request, place: int, tokens: list[int]) -> Sequence:
    """Return a sequence that belongs to no scheduler."""
    chain = TokenChain(tokens, root_of(Namespace(), b""), 4)
    return Sequence(0, request, place, tokens, chain, (0, 0, place), strategy_of(request))


def live(request: Request) -> list[Sequence]:
    """Return the beams that run, by place."""
    assert request.search is not None
    return [request.sequences[place] for place in sorted(request.search.scores)]


def candidates_of(request: Request, model: Model, stops: Callable[[tuple[int, ...]], str | None]) -> list[Candidate]:
    """Return a step's candidates as a data plane would find them."""
    assert request.search is not None
    found = [
        Candidate(idx, token, request.search.scores[beam.sample_idx] + logprob, stop=stops((*output, token)))
        for idx, beam in enumerate(live(request))
        for output in [tuple(beam.output_token_ids)]
        for token, logprob in enumerate(model(output))
        if logprob > -inf
    ]
    return sorted(found, key=lambda candidate: -candidate.score)[: num_candidates(request)]


def apply(request: Request, edits: list[BeamEdit], candidates: list[Candidate]) -> bool:
    """Do what a scheduler does, on lists; say whether the search is over. Nothing may be named in another order."""
    held = {beam.sample_idx for beam in live(request)} if any(isinstance(edit, Finish) for edit in edits) else None
    order = [Drop, Fork, Append]
    kinds = [type(edit) for edit in edits]
    if held is not None or all(kind is Finish for kind in kinds):
        return True
    assert kinds == sorted(kinds, key=order.index)
    for edit in edits:
        if isinstance(edit, Fork):
            parent = request.sequences[edit.parent_idx]
            child = sequence_of(request, edit.sample_idx, parent.tokens.copy())
            assert edit.sample_idx <= len(request.sequences), "a place was left out"
            request.sequences[edit.sample_idx : edit.sample_idx + 1] = [child]
        elif isinstance(edit, Append):
            candidate = candidates[edit.draw_idx]
            request.sequences[edit.sample_idx].tokens.append(candidate.token_id)
    return False


def run(
    model: Model,
    rules: Rules,
    end_ids: frozenset[int] = frozenset(),
    stops: Callable[[tuple[int, ...]], str | None] = lambda _: None,
) -> list[Found]:
    """Search with the real strategy on lists, and return what it found."""
    request = request_for(rules, end_ids)
    assert request.search is not None
    while True:
        beams, candidates = live(request), candidates_of(request, model, stops)
        edits = advance_beams(request.search, beams, candidates)
        if apply(request, edits, candidates):
            break
        assert len(live(request)) <= rules.width
        assert len({tuple(beam.tokens) for beam in live(request)}) == len(live(request)), "two beams are the same"
        assert len(request.sequences) <= rules.width
    assert request.search.num_dropped(request.search.finished) >= 0
    return [Found(hypothesis.token_ids, hypothesis.score) for hypothesis in request.search.finished]


penalties = st.sampled_from([1.0, 0.0, 0.5, 2.0, -1.0])
stoppings = st.sampled_from([False, True, "never"])


@settings(max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(2, 12),
    width=st.integers(2, 9),
    max_tokens=st.integers(1, 8),
    num_end_ids=st.integers(0, 3),
    end_weight=st.sampled_from([0.1, 1.0, 8.0]),
    length_penalty=penalties,
    early_stopping=stoppings,
)
def test_the_same_as_the_slow_twin(
    seed: int,
    vocab_size: int,
    width: int,
    max_tokens: int,
    num_end_ids: int,
    end_weight: float,
    length_penalty: float,
    early_stopping: bool | str,
) -> None:
    num_end_ids = min(num_end_ids, vocab_size - 1)
    ends = frozenset(range(vocab_size - num_end_ids, vocab_size))
    rules = Rules(width, max_tokens, lambda out: out[-1] in ends, length_penalty, early_stopping, num_end_ids)
    model = random_model(seed, vocab_size, end_weight)
    assert run(model, rules, ends) == search_slowly(model, rules)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), width=st.integers(2, 6), early_stopping=stoppings)
def test_stop_strings_end_hypotheses(seed: int, width: int, early_stopping: bool | str) -> None:
    """Many candidates may end at once then, and fewer beams than the width go on."""

    def stops(output: tuple[int, ...]) -> str | None:
        return "stop" if sum(output) % 3 == 0 else None

    rules = Rules(width, 7, lambda out: stops(out) is not None, early_stopping=early_stopping, num_end_ids=0)
    model = random_model(seed, 4)
    assert run(model, rules, stops=stops) == search_slowly(model, rules)


@pytest.mark.parametrize("length_penalty", [1.0, 0.5, 2.0, 0.0, -1.0])
@pytest.mark.parametrize("seed", range(6))
def test_as_wide_as_there_are_outputs_the_best_are_found(seed: int, length_penalty: float) -> None:
    model = random_model(seed, 3)
    rules = Rules(3**4, 4, lambda out: out[-1] == 2, length_penalty, "never")
    best = sorted(every_output(model, rules), key=lambda way: -way.score)
    found = run(model, rules, frozenset({2}))
    assert [way.tokens for way in found] == [way.tokens for way in best]
    assert [way.score for way in found] == pytest.approx([way.score for way in best], abs=1e-12)


def edits_of(scores: dict[int, float], candidates: list[Candidate], width: int = 3) -> list[BeamEdit]:
    request = request_for(Rules(width, 9, lambda _: False), frozenset({7}))
    assert request.search is not None
    places = sorted(scores)
    request.sequences[:] = [sequence_of(request, place, [*PROMPT, 9, place]) for place in range(max(places) + 1)]
    request.search.scores, request.search.last_steps = dict(scores), dict.fromkeys(scores)
    return advance_beams(request.search, [request.sequences[place] for place in places], candidates)


def test_a_prompt_forks_into_beams() -> None:
    edits = edits_of({0: 0.0}, [Candidate(0, token, -1.0 - token) for token in range(6)])
    assert edits == [Fork(1, 0), Fork(2, 0), Append(0, 0), Append(1, 1), Append(2, 2)]


def test_given_up_beams_leave_their_places_to_forks() -> None:
    candidates = [Candidate(1, 4, -3.0), Candidate(2, 4, -4.0), Candidate(1, 5, -5.0), Candidate(0, 4, -6.0)]
    edits = edits_of({0: -2.0, 1: -1.0, 2: -2.5}, candidates)
    assert edits == [Drop(0), Fork(0, 1), Append(1, 0), Append(0, 2), Append(2, 1)]


def test_a_candidate_that_ends_neither_goes_on_nor_takes_a_place() -> None:
    candidates = [Candidate(0, 7, -1.0), Candidate(0, 4, -3.0), Candidate(1, 4, -4.0)]
    assert edits_of({0: -0.5, 1: -2.0}, candidates, width=2) == [Append(0, 1), Append(1, 2)]


def test_without_a_candidate_and_a_hypothesis_the_request_fails() -> None:
    assert edits_of({0: 0.0}, []) == [Finish(0, FinishReason.ERROR)]


def test_without_a_candidate_what_has_ended_is_the_result() -> None:
    rules = Rules(2, 5, lambda out: out[-1] == 2)

    def model(output: tuple[int, ...]) -> list[float]:
        return [-inf, -1.0, -0.5] if not output else [-inf] * 3

    assert run(model, rules, frozenset({2})) == search_slowly(model, rules) == [Found((2,), -0.5)]


def test_tokens_of_given_up_beams_are_counted() -> None:
    """Of two beams over two steps, one way is kept: its first token, its second, and the other's tokens are dropped."""
    request = request_for(Rules(2, 2, lambda _: False))
    search = request.search
    assert search is not None
    first = [Candidate(0, 5, -1.0), Candidate(0, 6, -2.0)]
    apply(request, advance_beams(search, live(request), first), first)
    second = [Candidate(0, 5, -1.5), Candidate(0, 6, -1.6), Candidate(1, 5, -9.0)]
    assert apply(request, advance_beams(search, live(request), second), second)
    assert [hypothesis.token_ids for hypothesis in search.finished] == [(5, 5), (5, 6)]
    assert search.num_tokens == 4
    assert search.num_dropped(search.finished) == 1
    assert search.num_dropped(search.finished[:1]) == 2
