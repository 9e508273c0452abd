"""Beam search over HTTP: both routes, both spellings, and what is counted."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.process import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
BEAMS: dict[str, Any] = {"prompt": "hello", "max_tokens": 5, "beam_width": 4, "n": 3}


def test_the_best_come_first_with_their_scores(server: ServerProcess) -> None:
    answer = server.post(COMPLETIONS, {**BEAMS, "return_token_ids": True}).json()
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    scores = [choice["beam_score"] for choice in choices]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    num_output = sum(len(choice["token_ids"]) for choice in choices)
    usage = answer["usage"]
    assert usage["completion_tokens"] == num_output, "the outputs, and nothing of beams that were given up"
    assert usage["completion_tokens_details"]["pruned_tokens"] > 0


@pytest.mark.parametrize("width", [{"best_of": 4, "n": 3}, {"beam_width": 4, "n": 3}])
def test_the_spelling_of_vllm_means_the_same(server: ServerProcess, width: dict[str, int]) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "use_beam_search": True, "temperature": 0, **width}
    assert server.post(COMPLETIONS, body).json()["choices"] == server.post(COMPLETIONS, BEAMS).json()["choices"]


def test_without_best_of_n_is_the_width(server: ServerProcess) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "use_beam_search": True, "n": 4}
    same = {**BEAMS, "n": 4}
    assert server.post(COMPLETIONS, body).json()["choices"] == server.post(COMPLETIONS, same).json()["choices"]


def test_several_prompts_have_indexes_of_their_own(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny", prompt=["ab", "abcd"], n=2, max_tokens=4, extra_body={"beam_width": 3, "ignore_eos": True}
    )
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert done.usage.completion_tokens == 2 * 2 * 4


def test_a_chat_is_searched_too(client: openai.OpenAI, server: ServerProcess) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=4, logprobs=True, extra_body={"beam_width": 4, "length_penalty": 0.0}
    )
    (choice,) = done.choices
    # Without a length penalty the score is the plain sum.
    content, extra = choice.logprobs.content, choice.model_extra
    assert content is not None
    assert extra is not None
    total = sum(one.logprob for one in content)
    assert extra["beam_score"] == pytest.approx(total, abs=1e-4)
    refused = server.post(CHAT, {"messages": USER, "beam_width": 4, "stream": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream"


def test_stop_strings_end_hypotheses(server: ServerProcess) -> None:
    """The model says "xyz" behind a Q and ends; a stop string cuts the best hypothesis short."""
    plain = {"prompt": "Q", "max_tokens": 8, "beam_width": 2}
    (choice,) = server.post(COMPLETIONS, plain).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("xyz", "stop")
    (choice,) = server.post(COMPLETIONS, {**plain, "stop": ["yz"], "early_stopping": True}).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert "yz" not in choice["text"]
