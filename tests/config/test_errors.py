"""Errors are API: what was wrong, what was allowed, both numbers, and one root."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from quire import errors
from quire.errors import (
    CheckpointError,
    ConfigError,
    InvalidParameter,
    InvariantViolation,
    LogError,
    PromptTooLong,
    QueueFull,
    QuireError,
    RequestError,
    UnsupportedFeature,
    UnsupportedModel,
    WorkerError,
    shown,
)


@pytest.mark.parametrize(
    ("error", "parent", "message"),
    [
        (ConfigError("too small", field="x"), QuireError, "too small"),
        (CheckpointError("no file"), ConfigError, "no file"),
        (UnsupportedModel("no family"), ConfigError, "no family"),
        (LogError("no log"), QuireError, "no log"),
        (RequestError("no"), QuireError, "no"),
        (InvalidParameter("n", 0, "an integer from 1"), RequestError, "n must be an integer from 1, got 0"),
        (
            PromptTooLong(12, 10, "the context length"),
            RequestError,
            "the prompt has 12 tokens but the context length allows at most 10",
        ),
        (UnsupportedFeature("lora", "no adapters"), RequestError, "lora is not supported: no adapters"),
        (QueueFull(8, 2), RequestError, "the server's queue is full (8 requests); retry after 2 s"),
        (WorkerError("lost"), QuireError, "lost"),
        (InvariantViolation("M2", "3, not 2"), QuireError, "invariant M2: 3, not 2"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_messages_and_family(error: QuireError, parent: type[QuireError], message: str) -> None:
    assert isinstance(error, parent)
    assert str(error) == message


def test_every_error_has_the_same_root() -> None:
    found = inspect.getmembers(errors, inspect.isclass)
    kinds = [kind for _, kind in found if kind.__module__ == errors.__name__]
    assert len(kinds) > 10
    assert all(issubclass(kind, QuireError) for kind in kinds)


def test_request_errors_carry_a_field_and_a_code() -> None:
    assert (RequestError("no").field, RequestError("no").code) == (None, "invalid_request")
    assert (PromptTooLong(2, 1, "it").field, PromptTooLong(2, 1, "it").code) == ("prompt", "context_length_exceeded")
    assert (UnsupportedFeature("lora", "no").field, UnsupportedFeature("lora", "no").code) == (
        "lora",
        "unsupported_feature",
    )
    assert (QueueFull(8, 2).retry_after_s, QueueFull(8, 2).code) == (2, "queue_full")


def test_long_values_are_shown_shortened() -> None:
    error = InvalidParameter("stop", "x" * 500, "short")
    assert len(str(error)) < 200
    assert str(error).endswith("xxx...")
    assert error.value == "x" * 500


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    "value",
    [
        None, True, 1.5, -7, "a'b", b"\x00", [], [1, "a", None], (), (1,), (1, 2), {}, {"a": [1, {"b": ()}]}, {3},
        set(), frozenset(), frozenset({"x"}), [[[]], {}], range(3), "é\ud800",
    ],
)  # fmt: skip
def test_short_values_are_shown_as_they_are_written(value: object) -> None:
    assert shown(value) == repr(value)


def test_what_is_shown_costs_no_more_than_it_is_long() -> None:
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    looped: dict[str, Any] = {}
    looped["self"] = looped
    assert shown(deep) == "[" * 117 + "..."
    assert len(shown(looped)) == 120
    assert shown(list(range(10**6))).startswith("[0, 1, 2, ")
    assert shown({"x" * 10**7: 1}).endswith("xxx...")
    assert len(shown([["long"] * 50] * 10**6)) == 120
    assert shown(10**5000) == "<int>"
    assert shown([Unprintable()]) == "[<Unprintable>]"
    assert str(InvalidParameter("n", deep, "flat")) == "n must be flat, got " + "[" * 117 + "..."
