"""Parameters of beam search, and parameters that it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidParameter
from quire.sequences import SamplingParams
from quire.sequences.decoding.strategies import SAMPLING
from quire.sequences.params import MAX_BEAM_WIDTH, NO_CHOICE


def refused(**params: Any) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**params)
    return caught.value


@pytest.mark.parametrize("width", [2, 3, MAX_BEAM_WIDTH])
def test_a_width_is_the_number_of_sequences(width: int) -> None:
    params = SamplingParams(beam_width=width, n=2)
    assert params.num_sequences == width
    assert not params.is_ranked
    assert not params.measures_tokens


@pytest.mark.parametrize("width", [0, 1, -1, MAX_BEAM_WIDTH + 1, 2.0, "2", True])
def test_other_widths_are_refused(width: object) -> None:
    assert refused(beam_width=width).field == "beam_width"


@pytest.mark.parametrize("penalty", [-10.0, -1, 0, 0.5, 10])
def test_length_penalties(penalty: float) -> None:
    params = SamplingParams(beam_width=2, length_penalty=penalty)
    assert params.length_penalty == penalty
    assert type(params.length_penalty) is float


@pytest.mark.parametrize("penalty", [-10.1, 10.1, float("nan"), float("inf"), None, "1", True])
def test_other_length_penalties_are_refused(penalty: object) -> None:
    assert refused(beam_width=2, length_penalty=penalty).field == "length_penalty"


@pytest.mark.parametrize("stopping", [True, False, "never"])
def test_early_stopping(stopping: bool | str) -> None:
    assert SamplingParams(beam_width=2, early_stopping=stopping).early_stopping == stopping


@pytest.mark.parametrize("stopping", [0, 1, None, "Never", "", "true"])
def test_other_early_stopping_is_refused(stopping: object) -> None:
    assert refused(beam_width=2, early_stopping=stopping).field == "early_stopping"


@pytest.mark.parametrize("changes", [{"length_penalty": 0.5}, {"early_stopping": True}, {"early_stopping": "never"}])
def test_what_belongs_to_a_search_means_nothing_without_one(changes: dict[str, Any]) -> None:
    error = refused(**changes)
    assert error.field in changes
    assert "beam_width" in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 4),
        ("n", 5),
        ("speculative", True),
        ("strategy", SAMPLING),
        ("temperature", 0.7),
        ("top_k", 5),
        ("top_p", 0.9),
        ("min_p", 0.1),
        ("typical_p", 0.9),
        ("top_n_sigma", 1.0),
    ],
)
def test_what_a_search_would_ignore_is_refused(name: str, value: object) -> None:
    error = refused(beam_width=4, **{name: value})
    assert error.field == name
    assert "beam_width" in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_k": -1},
        {"speculative": False},
        {"seed": 3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5, "dry_multiplier": 1.0},
        {"bad_words": ["a"], "logit_bias": {3: 1.0}, "allowed_token_ids": (3, 4), "min_tokens": 2},
        {"stop": ["."], "stop_token_ids": (4,), "logprobs": 2, "prompt_logprobs": 1},
        {"logits_processors": [max]},
    ],
)
def test_what_changes_scores_or_ends_outputs_has_its_meaning(changes: dict[str, Any]) -> None:
    assert SamplingParams(beam_width=4, **changes).beam_width == 4


def test_what_a_model_recommends_for_samples_is_left_out() -> None:
    recommended: dict[str, Any] = {**NO_CHOICE, "beam_width": 2}
    assert SamplingParams(**recommended).beam_width == 2
