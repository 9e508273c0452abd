"""From fields to sampling parameters: one validator, in the client's spelling."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import InvalidParameter
from quire.server.generation import sampling
from quire.server.requests.fields import Fields
from tests.config.test_resolve import resolved


def read(body: dict[str, Any], **own: Any) -> Any:
    return sampling.read_sampling(Fields(body), {"temperature": 0.7, "top_p": 0.9}, own, {"max_tokens": "theirs"})


def test_the_model_recommends_and_the_client_decides() -> None:
    assert read({}).temperature == 0.7
    assert read({"temperature": None}).temperature == 0.7
    assert read({"temperature": 0}).temperature == 0.0
    assert read({"temperature": 0}).top_p == 0.9


def test_string_keys_of_a_logit_bias_are_token_ids() -> None:
    assert read({"logit_bias": {"12": -100, "7": 1.5}}).logit_bias == {12: -100.0, 7: 1.5}


@pytest.mark.parametrize("key", ["a", "-1", "1.0", "", " 1", "1_0", "\u0661", "9" * 400])
def test_other_keys_are_refused(key: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read({"logit_bias": {key: 1}})
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize("value", [True, "0.5", float("nan"), float("inf"), [], {}, -0.1, 101])
def test_a_value_that_is_no_number_in_range_is_refused(value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        read({"temperature": value})
    assert caught.value.field == "temperature"


def test_an_error_names_the_field_as_the_client_wrote_it() -> None:
    with pytest.raises(InvalidParameter, match="theirs must be") as caught:
        read({}, max_tokens=0)
    assert caught.value.field == "theirs"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"stream": 1}, "stream"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"priority": 2**31}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": 1}, "cache_salt"),
        ({"user": 1}, "user"),
        ({"return_token_ids": "x"}, "return_token_ids"),
    ],
)
def test_options_are_honoured_or_refused(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        sampling.read_options(Fields(body), resolved())
    assert caught.value.field == field


def test_a_priority_needs_its_policy() -> None:
    config = resolved(scheduling_policy="priority")
    assert [sampling.read_options(Fields({"priority": value}), config).priority for value in (-5, None)] == [-5, 0]
