"""Whole (not streamed) answers of both generating routes."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from quire.text.tokenizers.tokenizer import Tokenizer
from tests.server.checkpoint import CONTEXT, SAYING
from tests.server.process import ServerProcess
from tests.server.streams import stream, text_of

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 30}
USER: list[Any] = [{"role": "user", "content": "hi"}]


def test_cached_tokens_are_always_reported(client: openai.OpenAI) -> None:
    prompt = "§ nobody has sent this prompt before, and it is longer than two blocks"
    # Salted, since others may have sent prompts that begin alike.
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 1,
        "extra_body": {"cache_salt": "always told"},
    }
    usages = [client.completions.create(**options).usage for _ in range(2)]
    assert usages[0].prompt_tokens_details.cached_tokens == 0
    assert 32 <= usages[1].prompt_tokens_details.cached_tokens < usages[1].prompt_tokens


def test_cache_salts_keep_prompts_apart(server: ServerProcess) -> None:
    def cached(salt: str | None) -> int:
        body = {
            "prompt": "another prompt that is longer than two blocks of tokens",
            "max_tokens": 1,
            "cache_salt": salt,
        }
        return int(server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    # Without a salt, others may have sent prompts that begin alike.
    assert [cached("one"), cached("two")] == [0, 0]
    assert cached("one") >= 32 > 8 > cached(None)


def test_each_prompt_of_a_batch_counts_once(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny", prompt=["ab", "abcd"], n=3, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert done.usage.prompt_tokens == 3 + 5
    assert done.usage.completion_tokens == 2 * 3 * 5
    assert [choice.index for choice in done.choices] == list(range(6))


def test_the_models_end_token_gives_finish_reason_stop(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model="tiny", prompt="Q", **GREEDY).choices
    assert (choice.text, choice.finish_reason) == ("xyz", "stop")


def test_the_end_of_the_context_gives_finish_reason_length(client: openai.OpenAI) -> None:
    done = client.completions.create(
        model="tiny", prompt=[7] * (CONTEXT - 3), max_tokens=50, extra_body={"ignore_eos": True}
    )
    assert done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_that_is_too_long_is_a_400(server: ServerProcess, path: str) -> None:
    body = (
        {"prompt": "a" * CONTEXT}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "a" * CONTEXT}]}
    )
    for more in ({}, {"stream": True}):
        response = server.post(path, {**body, **more})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == next(iter(body))
        assert str(CONTEXT - 1) in error["message"]


def test_completions_default_to_16_tokens_and_chats_to_no_limit(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="Z", temperature=0).usage.completion_tokens == 16
    both = client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=9, max_completion_tokens=4, temperature=0
    )
    assert both.usage.completion_tokens == 4
    assert (
        client.chat.completions.create(model="tiny", messages=USER, max_tokens=9, temperature=0).usage.completion_tokens
        == 9
    )


def test_a_chat_without_max_tokens_may_fill_the_context(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "a" * (CONTEXT - 20)}]
    body = server.post("/v1/chat/completions", {"messages": messages, "ignore_eos": True}).json()
    assert body["usage"]["total_tokens"] == CONTEXT
    assert body["choices"][0]["finish_reason"] == "length"


def test_completion_logprobs_are_four_parallel_arrays(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model="tiny", prompt="Z", logprobs=3, **GREEDY).choices
    arrays = choice.logprobs
    assert len(arrays.tokens) == len(arrays.token_logprobs) == len(arrays.top_logprobs) == len(arrays.text_offset) == 30
    assert all(len(top) == 3 for top in arrays.top_logprobs)
    for token, start, top, logprob in zip(
        arrays.tokens, arrays.text_offset, arrays.top_logprobs, arrays.token_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values())
        assert token.startswith("bytes:") or choice.text[start:].startswith(token)
    zero = client.completions.create(model="tiny", prompt="Z", logprobs=0, **GREEDY).choices[0].logprobs
    assert [list(top) for top in zero.top_logprobs] == [[token] for token in zero.tokens]


def test_chat_logprobs_carry_bytes(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(model="tiny", messages=USER, logprobs=True, top_logprobs=2, **GREEDY)
    content = done.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode("utf-8", "ignore").startswith(SAYING)
    assert all(len(entry.top_logprobs) == 2 and entry.top_logprobs[0].token == entry.token for entry in content)
    bare = client.chat.completions.create(model="tiny", messages=USER, logprobs=True, **GREEDY)
    assert all(entry.top_logprobs == [] for entry in bare.choices[0].logprobs.content)
    none = client.chat.completions.create(model="tiny", messages=USER, logprobs=False, top_logprobs=0, **GREEDY)
    assert none.choices[0].logprobs is None


def test_streamed_and_whole_logprobs_agree(server: ServerProcess) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "ab\u00e9Z", "echo": True, "logprobs": 2, **GREEDY}),
        ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 2, **GREEDY}),
    ):
        whole = server.post(path, body).json()["choices"][0]["logprobs"]
        _, chunks = stream(server, path, body)
        parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
        for name in whole.keys() - {"refusal"}:
            assert _rounded([item for part in parts for item in part[name]]) == _rounded(whole[name])


def test_logprobs_are_those_of_the_raw_distribution(server: ServerProcess, tokenizer: Tokenizer) -> None:
    (x,) = tokenizer.encode("x", add_special_tokens=False)
    plain = {"prompt": "Z", "max_tokens": 1, "logprobs": 1}
    answers = [
        server.post("/v1/completions", {**plain, **more}).json()["choices"][0]["logprobs"]
        for more in ({"temperature": 0}, {"temperature": 0, "logit_bias": {str(x): 100}}, {"allowed_token_ids": [x]})
    ]
    likeliest = answers[0]["top_logprobs"][0]["a"]
    for answer in answers[1:]:
        assert answer["tokens"] == ["x"]
        assert answer["top_logprobs"][0]["a"] == pytest.approx(likeliest, abs=1e-4)
        assert answer["top_logprobs"][0]["x"] == answer["token_logprobs"][0] < -5
    many = server.post("/v1/completions", {**plain, "logprobs": 64, "temperature": 5}).json()["choices"][0]["logprobs"]
    assert 0.99 < sum(math.exp(logprob) for logprob in many["top_logprobs"][0].values()) < 1.001


def test_best_of_returns_the_likeliest_samples(server: ServerProcess) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "temperature": 1.5, "seed": 1, "ignore_eos": True}
    every = server.post("/v1/completions", {**body, "n": 5, "logprobs": 0}).json()["choices"]
    ranked = sorted(every, key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
    best = server.post("/v1/completions", {**body, "n": 2, "best_of": 5}).json()
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in ranked[:2]]
    assert best["usage"]["completion_tokens"] == 30, "what was sampled, not what is shown"
    refused = server.post("/v1/completions", {**body, "best_of": 5, "stream": True})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "best_of"


def test_the_request_of_lm_eval_is_answered(server: ServerProcess, tokenizer: Tokenizer) -> None:
    context, continuation = tokenizer.encode("helloZ"), tokenizer.encode("abc", add_special_tokens=False)
    ids = context + continuation
    body = {"prompt": [ids], "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    arrays = choice["logprobs"]
    assert len(arrays["tokens"]) == len(ids) + 1
    assert arrays["token_logprobs"][0] is None
    assert arrays["top_logprobs"][0] is None
    sliced = slice(len(context), -1)
    assert arrays["tokens"][sliced] == ["a", "b", "c"]
    assert all(logprob > -0.1 for logprob in arrays["token_logprobs"][sliced])
    for token, top in zip(arrays["tokens"][sliced], arrays["top_logprobs"][sliced], strict=True):
        assert max(top, key=top.get) == token
    assert choice["text"] == "helloZabcd"


@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_returns_the_prompt(server: ServerProcess, tokenizer: Tokenizer, max_tokens: int, as_ids: bool) -> None:
    text = "h\u00e9 \U0001f984 worldZ"
    ids = tokenizer.encode(text)
    body = {
        "prompt": ids if as_ids else text,
        "echo": True,
        "max_tokens": max_tokens,
        "temperature": 0,
        "n": 2,
        "logprobs": 1,
    }
    whole = server.post("/v1/completions", body).json()
    _, chunks = stream(server, "/v1/completions", body)
    for choice in whole["choices"]:
        assert choice["text"] == text + SAYING[:max_tokens] == text_of(chunks, choice["index"])
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert len(choice["logprobs"]["tokens"]) == len(ids) + max_tokens
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert parts[-1]["finish_reason"] == "length"
        offsets = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
    assert whole["usage"]["completion_tokens"] == 2 * max_tokens
    assert whole["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
def test_an_echo_that_ends_inside_a_character_is_completed(
    server: ServerProcess, tokenizer: Tokenizer, num_bytes: int
) -> None:
    ids = tokenizer.encode("ab\U0001f984", add_special_tokens=False)[: 2 + num_bytes]
    body = {"prompt": ids, "echo": True, "max_tokens": 4 - num_bytes + 2, "temperature": 0, "logprobs": 1}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["text"] == "ab\U0001f984hi"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2, 2, 3, 4]
    _, chunks = stream(server, "/v1/completions", body)
    assert text_of(chunks) == choice["text"]


def test_prompt_logprobs_of_a_cached_prompt_are_the_same(server: ServerProcess) -> None:
    body = {"prompt": "the same prompt, longer than two blocks, twice", "echo": True, "max_tokens": 0, "logprobs": 1}
    first, second = (server.post("/v1/completions", body).json()["choices"][0]["logprobs"] for _ in range(2))
    assert first["token_logprobs"][1:] == pytest.approx(second["token_logprobs"][1:], abs=1e-3)
    shown = server.post(
        "/v1/completions", {**body, "echo": False, "max_tokens": 1, "logprobs": None, "prompt_logprobs": 1}
    )
    rows = shown.json()["choices"][0]["prompt_logprobs"]
    own = [next(iter(row.values()))["logprob"] for row in rows[1:]]
    assert own == pytest.approx(first["token_logprobs"][1:], abs=1e-3)


def test_a_seed_gives_the_same_tokens_in_any_batch(server: ServerProcess) -> None:
    body: dict[str, Any] = {
        "prompt": "a prompt of more than two blocks, so that it is found again",
        "seed": 5,
        "temperature": 3,
        "max_tokens": 12,
    }
    body |= {"return_token_ids": True, "ignore_eos": True}

    def ids(prompt: str | list[str]) -> list[list[int]]:
        answer = server.post("/v1/completions", {**body, "prompt": prompt}).json()
        return [choice["token_ids"] for choice in answer["choices"]]

    (alone,) = ids(body["prompt"])
    (cached,) = ids(body["prompt"])
    crowd = ids(["other", body["prompt"], "prompts " * 9, "around it"])
    assert alone == cached == crowd[1]
    assert ids(body["prompt"]) != [
        server.post("/v1/completions", {**body, "seed": 6}).json()["choices"][0]["token_ids"]
    ]


def test_temperature_zero_is_greedy(client: openai.OpenAI) -> None:
    done = client.completions.create(model="tiny", prompt="Z", n=4, temperature=0, max_tokens=28)
    assert {choice.text for choice in done.choices} == {SAYING + "abcdef"}


def test_the_developer_role_and_content_parts_are_understood(server: ServerProcess) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    conversations = [
        [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}],
        [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}],
    ]
    tokens = [server.post("/tokenize", {"messages": messages}).json()["tokens"] for messages in conversations]
    assert tokens[0] == tokens[1]
    body = {"messages": conversations[1], "return_token_ids": True, **GREEDY}
    assert server.post("/v1/chat/completions", body).json()["prompt_token_ids"] == tokens[0]


def test_unknown_fields_and_unused_tools_are_ignored(server: ServerProcess) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    more = {
        "invented": {"by": "a client"},
        "tools": tools,
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "user": "me",
    }
    more |= {"response_format": {"type": "text"}, "modalities": ["text"], "store": False, "service_tier": "auto"}
    answer = server.post("/v1/chat/completions", {"messages": USER, "model": "tiny", **GREEDY, **more})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"].startswith(SAYING)


def test_a_chat_begins_with_one_mark_of_the_beginning(server: ServerProcess, tokenizer: Tokenizer) -> None:
    ids = server.post("/tokenize", {"messages": USER}).json()["tokens"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|><|user|>hi<|eos|><|assistant|>"
    styled = server.post("/tokenize", {"messages": USER, "chat_template_kwargs": {"style": "!"}}).json()["tokens"]
    assert tokenizer.decode(styled, skip_special_tokens=False).endswith("<|assistant|>!")


def test_tokenize_and_detokenize(server: ServerProcess, tokenizer: Tokenizer) -> None:
    text = "h\u00e9 world"
    answer = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), CONTEXT)
    assert answer["token_strs"][-1] == " world"
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "<|bos|>" + text}
    bare = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert bare == answer["tokens"][1:]


def test_tokens_can_be_named_by_id(server: ServerProcess, tokenizer: Tokenizer) -> None:
    body = {"prompt": "Z", "logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True, **GREEDY}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert choice["prompt_token_ids"] == tokenizer.encode("Z")


def test_the_models_route_knows_the_one_model(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other/model")
    assert caught.value.code == "model_not_found"


def _rounded(values: list[Any]) -> Any:
    """Return the same with floats rounded: batches of another shape may round sums another way."""
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    if isinstance(values, dict):
        return {name: _rounded(value) for name, value in values.items()}
    return round(values, 3) + 0.0 if isinstance(values, float) else values
