"""Sampling parameters: each range at, inside and outside its border, and every wrong type, refused by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import InvalidParameter, UnknownParameter
from quire.sequences import SamplingParams
from quire.sequences.param_checks import MAX_LOGIT_BIAS, MAX_STRING_CHARS, MAX_STRINGS
from quire.sequences.params import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_IDS,
)
from quire.sequences.thinking import ThinkingTokens

INT32 = 2**31 - 1
UP, DOWN = math.inf, -math.inf
ABOVE_ZERO = math.nextafter(0.0, UP)

INTEGERS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "top_k": (-1, INT32),
    "dry_allowed_length": (1, INT32),
    "dry_penalty_last_n": (-1, INT32),
    "seed": (-MAX_SEED - 1, MAX_SEED),
    "max_tokens": (1, INT32),
    "min_tokens": (0, 16),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
NUMBERS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (ABOVE_ZERO, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (ABOVE_ZERO, 1.0),
    "top_n_sigma": (-1.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")
NO_NUMBERS: tuple[Any, ...] = ("1", b"1", True, False, [1], {}, 1j, math.nan, UP, DOWN, 10**400, -(10**400))


def kept(name: str, value: Any) -> Any:
    """Return what parameters keep of a value."""
    params: dict[str, Any] = {name: value}
    return getattr(SamplingParams(**params), name)


def refused(**params: Any) -> InvalidParameter:
    """Return the refusal; it names the parameter, what it must be, and what it was."""
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**params)
    error = caught.value
    assert error.field in params
    assert error.code == "invalid_parameter"
    assert str(error).startswith(f"{error.field} must be {error.allowed}, got ")
    return error


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str) -> None:
    low, high = INTEGERS[name]
    for value in (low, low + 1, high - 1, high):
        taken = kept(name, value)
        assert taken == (max(value, 0) if name == "top_k" else value)
    for value in (low - 1, high + 1, float(low + 1), *NO_NUMBERS):
        assert refused(**{name: value}).field == name
    if name not in ("best_of", "seed", "max_tokens", "logprobs", "prompt_logprobs"):
        assert refused(**{name: None}).field == name


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    low, high = NUMBERS[name]
    for value in (low, (low + high) / 2, high):
        assert kept(name, value) == (max(value, 0.0) if name == "top_n_sigma" else value)
    whole = kept(name, 1)
    assert (whole, type(whole)) == (1.0, float)
    for value in (math.nextafter(low, DOWN), math.nextafter(high, UP), None, *NO_NUMBERS):
        assert refused(**{name: value}).field == name


def test_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-2) != SamplingParams()
    assert refused(seed=-1.0).field == "seed"


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0])
def test_flags(name: str, value: object) -> None:
    assert kept(name, True) is True
    assert kept(name, False) is False
    assert refused(**{name: value}).field == name


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "kept_special_ids"])
def test_token_ids(name: str) -> None:
    for given_ids in ([0, INT32], (0, INT32), {INT32, 0}, frozenset({0, INT32})):
        assert kept(name, given_ids) == (0, INT32)
    assert kept(name, [5, 3]) == (5, 3), "a list keeps its order"
    for value in ("12", b"12", 3, {3: 1.0}, [-1], [INT32 + 1], [True], [1.0], ["1"], [None]):
        assert refused(**{name: value}).field == name


def test_how_many_token_ids() -> None:
    assert len(kept("stop_token_ids", list(range(MAX_STOP_IDS)))) == MAX_STOP_IDS
    assert "65 ids" in str(refused(stop_token_ids=list(range(MAX_STOP_IDS + 1))))
    assert len(SamplingParams(allowed_token_ids=range_of(5000)).allowed_token_ids or ()) == 5000
    assert "1048577 ids" in str(refused(allowed_token_ids=[0] * (MAX_ALLOWED_IDS + 1)))
    assert "at least one" in str(refused(allowed_token_ids=[]))
    assert f"{2**20 + 1} ids" in str(refused(allowed_token_ids=[0] * (2**20 + 1)))
    assert refused(stop_token_ids=None).field == "stop_token_ids"


def range_of(count: int) -> tuple[int, ...]:
    return tuple(range(count))


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (None, ()),
        ("end", ("end",)),
        (["a", "b"], ("a", "b")),
        ((), ()),
        ("x" * MAX_STRING_CHARS, ("x" * MAX_STRING_CHARS,)),
        (["s"] * MAX_STRINGS, ("s",) * MAX_STRINGS),
    ],
)
def test_stop_strings(value: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=value).stop == kept


@pytest.mark.parametrize(
    "value", ["", [""], ["a", ""], "x" * (MAX_STRING_CHARS + 1), ["s"] * (MAX_STRINGS + 1), [1], 1, {"a"}, b"a", [None]]
)
def test_stop_strings_that_are_refused(value: Any) -> None:
    error = refused(stop=value)
    assert error.field == "stop"
    assert len(str(error)) < 400, "a long value is shown shortened"


def test_bad_words_and_breakers_are_strings_too() -> None:
    assert kept("bad_words", "end") == ("end",)
    assert len(kept("bad_words", ["w"] * MAX_BAD_WORDS)) == MAX_BAD_WORDS
    long = ["w" * 512] * (MAX_BAD_WORDS_CHARS // 512)
    assert len(kept("bad_words", long)) == len(long)
    with pytest.raises(InvalidParameter, match=f"{MAX_BAD_WORDS_CHARS} in all, got '{MAX_BAD_WORDS_CHARS + 1} char"):
        SamplingParams(bad_words=(*long, "w"))
    assert kept("dry_sequence_breakers", []) == ()
    for value in ("", [""], [1], 1, ["w"] * (MAX_BAD_WORDS + 1)):
        assert refused(bad_words=value).field == "bad_words"
        assert refused(dry_sequence_breakers=value).field == "dry_sequence_breakers"


def test_processors_are_functions() -> None:
    assert kept("logits_processors", [max]) == (max,)
    assert kept("logits_processors", None) == ()
    for value in (max, "max", [1], {max: 1}):
        assert refused(logits_processors=value).field == "logits_processors"


def test_stop_strings_need_text() -> None:
    assert "detokenize" in str(refused(stop="a", detokenize=False))
    assert SamplingParams(stop_token_ids=(1,), detokenize=False).stop == ()


def test_logit_bias() -> None:
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(logit_bias={0: -100, INT32: 100.0}).logit_bias == {0: -100.0, INT32: 100.0}
    assert len(SamplingParams(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), 1)).logit_bias or ()) == MAX_LOGIT_BIAS
    for value in (
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1),
        {0: 100.1},
        {0: -100.1},
        {0: math.nan},
        {0: "1"},
        {0: True},
        {-1: 1},
        {INT32 + 1: 1},
        {"5": 1},
        {True: 1},
        [(0, 1)],
        "bias",
    ):
        assert refused(logit_bias=value).field == "logit_bias"


def test_the_callers_objects_are_not_kept() -> None:
    bias, ids = {1: 1.0}, [1]
    params = SamplingParams(logit_bias=bias, stop_token_ids=ids)  # type: ignore[arg-type]
    bias[2] = 2.0
    ids.append(2)
    assert (params.logit_bias, params.stop_token_ids) == ({1: 1.0}, (1,))


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    error = refused(min_tokens=6, max_tokens=5)
    assert (error.field, str(error)) == ("min_tokens", "min_tokens must be at most max_tokens (5), got 6")


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"dry_multiplier": 0.5}, True),
        ({"dry_base": 3.0}, False),
        ({"bad_words": ["a"]}, True),
        ({"logits_processors": [max]}, True),
        ({"min_tokens": 3, "temperature": 0.0}, False),
    ],
)
def test_needs_history(changes: dict[str, Any], needs: bool) -> None:
    assert SamplingParams(**changes).needs_history is needs


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"beam_width": 2}, True),
        ({"typical_p": 0.9}, True),
        ({"top_n_sigma": 1.0}, True),
        ({"dry_multiplier": 0.5}, True),
        ({"bad_words": ["a"]}, True),
        ({"logit_bias": {1: 0.0}}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"logits_processors": [max]}, True),
        ({"logit_bias": {}, "bad_words": [], "logits_processors": [], "top_n_sigma": -1, "dry_base": 3.0}, False),
        ({"n": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}, False),
        ({"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "min_tokens": 2}, False),
        ({"structured_outputs": {"regex": "a"}, "logprobs": 1, "prompt_logprobs": 1, "stop": ["a"]}, False),
    ],
)
def test_the_host_draws_what_no_device_can(changes: dict[str, Any], needs: bool) -> None:
    assert SamplingParams(**changes).needs_host is needs


def test_the_best_of_fewer_than_are_returned() -> None:
    assert str(refused(n=3, best_of=2)) == "best_of must be at least n (3), got 2"
    assert not SamplingParams(n=3, best_of=3).is_ranked
    assert SamplingParams(n=3, best_of=4).num_sequences == 4


def test_greedy() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=ABOVE_ZERO).is_greedy


def test_parameters_are_values() -> None:
    params = SamplingParams(n=2, stop=["a"], logit_bias={1: 2})  # type: ignore[arg-type]
    assert params == SamplingParams(n=2, stop=("a",), logit_bias={1: 2.0})
    assert pickle.loads(pickle.dumps(params)) == params
    changed = dataclasses.replace(params, repetition_penalty=2)
    assert (changed.n, changed.needs_history) == (2, True)
    assert copy.copy(params) == copy.deepcopy(params) == params.clone() == params
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)  # type: ignore[call-arg]


def test_assigned_values_are_checked_and_derived_ones_follow() -> None:
    params = SamplingParams(stop=("a",))
    before = params.clone()
    params.stop, params.repetition_penalty = ["b"], 2  # type: ignore[assignment]
    assert (params.stop, params.repetition_penalty, params.needs_history) == (("b",), 2.0, True)
    assert (before.stop, before.needs_history) == (("a",), False)
    for name, value, error in (
        ("temperature", -1, InvalidParameter),
        ("min_tokens", 17, InvalidParameter),
        ("needs_history", False, UnknownParameter),
        ("temprature", 1, UnknownParameter),
    ):
        now = params.clone()
        with pytest.raises(error):
            setattr(params, name, value)
        assert params == now


@given(
    name=st.sampled_from([field.name for field in dataclasses.fields(SamplingParams) if field.init]),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text()),
)
def test_anything_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    options: dict[str, Any] = {name: value}
    try:
        params = SamplingParams(**options)
    except InvalidParameter as error:
        blamed = error.field
    else:
        assert pickle.loads(pickle.dumps(params)) == params
        return
    # A `min_tokens` above the default `max_tokens` is blamed on the former.
    assert blamed == name


# ---- what only the engine knows ----


def check(max_num_seqs: int = 4, **params: Any) -> None:
    SamplingParams(**params).check_for_model(vocab_size=50, max_num_seqs=max_num_seqs)


@pytest.mark.parametrize(
    ("fits", "fails"),
    [
        ({"n": 4}, {"n": 5}),
        ({"best_of": 4}, {"best_of": 5}),
        ({"beam_width": 4}, {"beam_width": 5}),
        ({"allowed_token_ids": (49,)}, {"allowed_token_ids": (3, 50)}),
        ({"allowed_token_ids": (49,) * 50}, {"allowed_token_ids": (49,) * 51}),
        ({"stop_token_ids": (49,)}, {"stop_token_ids": (50,)}),
        ({"kept_special_ids": (49,)}, {"kept_special_ids": (50,)}),
        ({"logit_bias": {49: 1.0}}, {"logit_bias": {50: 1.0}}),
        ({"thinking": ThinkingTokens(1, (49,), (49,))}, {"thinking": ThinkingTokens(1, (2,), (50, 2))}),
        ({"logprobs": 50}, {"logprobs": 51}),
        ({"prompt_logprobs": 50}, {"prompt_logprobs": 51}),
    ],
)
def test_check_for_model(fits: dict[str, Any], fails: dict[str, Any]) -> None:
    check(**fits)
    with pytest.raises(InvalidParameter) as caught:
        check(**fails)
    (name,) = fails
    assert caught.value.field == name
    assert ("4" if name in ("n", "best_of", "beam_width") else "50") in str(caught.value)
