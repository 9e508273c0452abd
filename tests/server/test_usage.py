"""Counting tokens."""

from __future__ import annotations

from dataclasses import replace

from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.memory import HitEnd, PrefixHit
from quire.server.admission.usage import TokenCount


def delta(num_prompt: int, *num_output: int, num_cached: int = 0) -> RequestOutput:
    outputs = [CompletionOutput(idx, token_ids=[9] * count) for idx, count in enumerate(num_output)]
    return RequestOutput("r", None, [1] * num_prompt, outputs, num_cached_tokens=num_cached)


def test_each_prompt_counts_once_and_every_sample_counts() -> None:
    count = TokenCount()
    for prompt_idx, num_prompt in enumerate((5, 7)):
        for _ in range(3):
            count.add(prompt_idx, delta(num_prompt, 1, 1))
    usage = count.as_json()
    assert usage.pop("prompt_tokens_details")["cached_tokens"] == 0
    assert usage == {"prompt_tokens": 12, "completion_tokens": 12, "total_tokens": 24}


def test_cached_tokens_are_reported_and_fewer_than_the_prompts() -> None:
    count = TokenCount()
    assert count.as_json()["prompt_tokens_details"]["cached_tokens"] == 0
    count.add(0, delta(16, 1, num_cached=16))
    assert count.as_json()["prompt_tokens_details"]["cached_tokens"] == 15


def test_details_of_all_prompts_add_up() -> None:
    count = TokenCount()
    for prompt_idx, hit in enumerate(
        (PrefixHit(13, (), HitEnd.NOT_CACHED, None, 0, 5), PrefixHit(0, (), HitEnd.LIMIT, None, 0))
    ):
        for _ in range(2):
            count.add(prompt_idx, replace(delta(16, 1), prompt_account=hit.account(16)))
    details = count.as_json()["prompt_tokens_details"]
    assert details["by_source"] == {"device": 8, "host": 0, "disk": 0, "copied": 5, "computed": 19}
    assert {reason: num for reason, num in details["computed_by_reason"].items() if num} == {
        "not_cached": 2,
        "limit": 15,
        "last_token": 2,
    }


def test_a_prompt_alone_has_no_output() -> None:
    count = TokenCount(is_prompt_only=True)
    count.add(0, delta(5, 1))
    assert count.as_json()["completion_tokens"] == 0
    assert count.as_json()["total_tokens"] == 5
