"""Adjustments of logits, number by number, and failures in custom processors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.execution.sampling.filters import apply_top_n_sigma, apply_typical_p
from quire.execution.sampling.logits_processing import LogitsProcessing, adjust
from quire.execution.sampling.penalties import MAX_REPEATED
from quire.execution.sampling.token_masks import bad_words_of
from quire.scheduling.plan import NewSequence
from quire.sequences.params import SamplingParams
from tests.execution.sampler_twin import VOCAB, adjusted, near_best, openings, repeats, typical

CPU = torch.device("cpu")


def logits_of(num_rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def adjust_one(new_sequence: NewSequence, logits: torch.Tensor) -> tuple[list[float], dict[int, str]]:
    """Return a row after the adjustments, and what failed."""
    row = logits.clone()
    errors = adjust(row, [(0, LogitsProcessing(new_sequence, CPU), len(new_sequence.token_ids))])
    return row[0].tolist(), errors


def close(values: list[float]) -> Any:
    return pytest.approx(values, rel=1e-5, abs=1e-5)


@settings(max_examples=100)
@given(batch=st.lists(openings(), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_every_adjustment_and_mixture_equals_the_twin(batch: list[NewSequence], seed: int) -> None:
    logits = logits_of(len(batch), seed)
    expected = [adjusted(row, new_sequence) for row, new_sequence in zip(logits.tolist(), batch, strict=True)]
    rows = [
        (row, LogitsProcessing(new_sequence, CPU), len(new_sequence.token_ids))
        for row, new_sequence in enumerate(batch)
    ]
    assert adjust(logits, [entry for entry in rows if not entry[1].is_none(entry[2])]) == {}
    assert logits.tolist() == [close(row) for row in expected]


@settings(max_examples=100)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    breakers=st.lists(st.integers(0, 3), max_size=1),
    allowed_length=st.integers(1, 4),
    last_n=st.sampled_from([-1, 7, 30]),
)
def test_repeats_of_a_text_that_says_little_equal_the_twin(
    tokens: list[int], breakers: list[int], allowed_length: int, last_n: int
) -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_allowed_length=allowed_length, dry_penalty_last_n=last_n)
    new_sequence = NewSequence(params, 0, 0, 1, tuple(tokens), (), dry_breakers=tuple(breakers))
    logits = logits_of(1, len(tokens))
    assert adjust_one(new_sequence, logits)[0] == close(adjusted(logits[0].tolist(), new_sequence))


def test_a_repetition_costs_the_more_the_longer_it_is() -> None:
    params = SamplingParams(dry_multiplier=0.5, dry_base=2.0, dry_allowed_length=2)
    # "3 4 5 6" was said, and once "4 5 9"; now comes "3 4 5".
    new_sequence = NewSequence(params, 0, 0, 1, (1, 3, 4, 5, 6, 2, 4, 5, 9, 7, 3, 4, 5), ())
    assert repeats(new_sequence) == {6: 3, 9: 2}
    changed = adjust_one(new_sequence, torch.zeros(1, VOCAB))[0]
    assert {i: value for i, value in enumerate(changed) if value} == {6: -0.5 * 2.0, 9: -0.5}


def test_a_text_that_says_one_thing_for_ever_is_bounded() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=100.0)
    values, errors = adjust_one(NewSequence(params, 0, 0, 1, (5,) * 5000, ()), torch.zeros(1, VOCAB))
    assert errors == {}
    assert values[5] < -1e29
    assert torch.tensor(values).isfinite().all()
    mild = SamplingParams(dry_multiplier=1.0, dry_base=1.0 + 2**-10, dry_allowed_length=MAX_REPEATED)
    assert adjust_one(NewSequence(mild, 0, 0, 1, (5,) * 5000, ()), torch.zeros(1, VOCAB))[0][5] == -1.0


def test_a_bad_word_may_begin_but_not_end() -> None:
    params = SamplingParams(bad_words=("w",))
    words = ((4, 5), (6,), (1, 2))
    for tokens, forbidden in (((9, 1, 4), {5, 6}), ((9, 4, 1), {2, 6}), ((4,), {6}), ((9, 4, 3), {6})):
        values, _ = adjust_one(NewSequence(params, 0, 0, 1, tokens, (), bad_words=words), torch.zeros(1, VOCAB))
        assert {i for i, value in enumerate(values) if value < 0} == forbidden, "the prompt's own tokens are no word"


def test_bad_words_of_all_lengths_equal_a_look_at_each() -> None:
    rng = random.Random(5)
    for _ in range(60):
        words = tuple(tuple(rng.choices(range(4), k=rng.randint(1, 6))) for _ in range(rng.randint(1, 40)))
        output = rng.choices(range(5), k=rng.randint(0, 9))
        found = bad_words_of(words).next_ids(torch.tensor(output, dtype=torch.int32)).tolist()
        assert set(found) == {last for *first, last in words if output[len(output) - len(first) :] == first}, words
    assert bad_words_of(words) is bad_words_of(tuple(map(tuple, words))), "samples of a request share the tree"


@pytest.mark.parametrize("spread", [0.3, 2.0, 8.0])
@pytest.mark.parametrize("typical_p", [0.01, 0.2, 0.9, 0.999])
def test_what_is_typical_equals_the_twin(spread: float, typical_p: float) -> None:
    logits = spread * torch.randn(6, 700, generator=torch.Generator().manual_seed(3), dtype=torch.float64).float()
    logits[:, 100:300] = -torch.inf
    expected = [typical({i: value.exp().item() for i, value in enumerate(row)}, typical_p) for row in logits.double()]
    apply_typical_p(logits, torch.full((6,), typical_p, dtype=torch.float64))
    for row, left in zip(logits, expected, strict=True):
        assert set(row.isfinite().nonzero()[:, 0].tolist()) == set(left)


@pytest.mark.parametrize("num_sigmas", [0.5, 1.0, 2.5])
def test_what_is_near_the_best_equals_the_twin(num_sigmas: float) -> None:
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(4))
    logits[:, 100:300] = -torch.inf
    expected = [near_best(dict(enumerate(row)), row, num_sigmas) for row in logits.tolist()]
    apply_top_n_sigma(logits, torch.full((6,), num_sigmas, dtype=torch.float64))
    for row, left in zip(logits, expected, strict=True):
        assert set(row.isfinite().nonzero()[:, 0].tolist()) == set(left) - set(range(100, 300))


def test_processors_see_prompt_and_output_and_come_in_order() -> None:
    calls: list[tuple[list[int], list[int]]] = []

    def add_one(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append((prompt, output))
        prompt.clear()  # theirs to keep
        return logits + 1.0

    def double(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append((prompt, output))
        return logits * 2.0

    params = SamplingParams(logits_processors=[add_one, double], logit_bias={3: 5.0})  # type: ignore[arg-type]
    values, errors = adjust_one(NewSequence(params, 0, 0, 2, (7, 8, 9), ()), torch.zeros(1, VOCAB))
    assert calls == [([], [9]), ([7, 8], [9])]
    assert errors == {}
    assert values == [12.0 if i == 3 else 2.0 for i in range(VOCAB)]


def fail(*_: Any) -> torch.Tensor:
    raise ValueError("no taste")


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


def fail_without_words(*_: Any) -> torch.Tensor:
    raise Unspeakable


class Nameless:
    def __getattr__(self, name: str) -> Any:
        raise (RuntimeError if name == "__qualname__" else AttributeError)(f"no {name}")

    def __call__(self, _prompt: list[int], _output: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits


@pytest.mark.parametrize(
    ("processor", "why"),
    [
        (fail, "fail raised ValueError: no taste"),
        (lambda *_: None, "must return 40 floating-point logits"),
        (lambda _prompt, _output, logits: logits[:3], "must return 40"),
        (lambda _prompt, _output, logits: logits.argsort(), "must return 40"),
        (lambda _prompt, _output, logits: logits * torch.nan, "none NaN"),
        (lambda _prompt, _output, logits: logits.double() + 1e39, "none NaN or infinity"),
        (lambda _prompt, _output, logits: logits.to("meta"), "raised"),
        (lambda _prompt, _output, logits: logits.to_sparse(), "raised"),
        (fail_without_words, "fail_without_words raised Unspeakable"),
        (Nameless(), "Nameless raised RuntimeError: no __qualname__"),
    ],
)
def test_a_processor_that_fails_is_its_own_rows_error(processor: Callable[..., Any], why: str) -> None:
    own = SamplingParams(logits_processors=[processor])  # type: ignore[arg-type]
    rows = [NewSequence(params, 0, 0, 1, (1,), ()) for params in (own, SamplingParams(logit_bias={2: 1.0}))]
    logits = torch.zeros(2, VOCAB)
    errors = adjust(logits, [(row, LogitsProcessing(new_sequence, CPU), 1) for row, new_sequence in enumerate(rows)])
    assert set(errors) == {0}
    assert why in errors[0]
    assert logits[0].tolist() == [0.0] * VOCAB
    assert logits[1, 2] == 1.0
