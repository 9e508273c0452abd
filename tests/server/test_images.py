"""Images over HTTP: every protocol gives the tokens of the same prompt, and refuses by name what is no image."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.images.tiny_model import PAD, data_url, in_base64, picture, save, url_part
from tests.server.process import ServerProcess, running

NUM_TOKENS = 6
FIRST, SECOND = picture(40, 24, 0), picture(16, 56, 1)
IMAGE = f"<|vision_start|>{PAD}<|vision_end|>"
GREEDY: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
TOOL_CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
# Texts with images, and their number of tokens: those of the images are 15 and 14.
BOTH = f"<|user|>{IMAGE}{IMAGE}What are these?<|assistant|>"
RESULT = f'<|user|>Look.<|assistant|>{{"name": "look", "arguments": {{}}}}<|tool|>Here:{IMAGE}<|assistant|>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "vision")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the output of each text of the tests, and the length of its prompt in tokens."""
    found = {}
    with LLM(str(folder), dtype="float32", num_kv_blocks=300, num_threads=1) as llm:
        for text, images in ((BOTH, [FIRST, SECOND]), (RESULT, [FIRST])):
            token_ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
            prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": images}}
            params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
            (output,) = llm.generate(prompt, params, use_tqdm=False)
            found[text] = output.outputs[0].text, len(output.prompt_token_ids)
    return found


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--num-kv-blocks", "600", "--max-num-seqs", "8", "--dtype", "float32", "--allowed-media-domains", "a.test")
    with running(folder, tmp_path_factory.mktemp("logs") / "images.log", *flags) as process:
        yield process


def both_parts() -> list[dict[str, Any]]:
    return [url_part(FIRST), url_part(SECOND, detail="high"), {"type": "text", "text": "What are these?"}]


def block(file: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": in_base64(file)}
    return {"type": "image", "source": source}


# Route, body, and what it means.
ASKED: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": both_parts()}]}, BOTH),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "tool_calls": [TOOL_CALL]},
                {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "Here:"}, url_part(FIRST)]},
            ]
        },
        RESULT,
    ),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": data_url(FIRST), "detail": "auto"},
                        {"type": "input_image", "image_url": data_url(SECOND)},
                        {"type": "input_text", "text": "What are these?"},
                    ],
                }
            ]
        },
        BOTH,
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "Look."},
                {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [
                        {"type": "input_text", "text": "Here:"},
                        {"type": "input_image", "image_url": data_url(FIRST)},
                    ],
                },
            ]
        },
        RESULT,
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [block(FIRST), block(SECOND), {"type": "text", "text": "What are these?"}]}
            ]
        },
        BOTH,
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "text", "text": "Here:"}, block(FIRST)],
                        }
                    ],
                },
            ]
        },
        RESULT,
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "What are these?", "images": [in_base64(FIRST), in_base64(SECOND)]}]},
        BOTH,
    ),
    ("/api/generate", {"prompt": "What are these?", "images": [in_base64(FIRST), in_base64(SECOND)]}, BOTH),
]
COUNTED = {
    "/v1/messages": ("/v1/messages/count_tokens", "input_tokens"),
    "/v1/responses": ("/v1/responses/input_tokens", "input_tokens"),
    "/v1/chat/completions": ("/tokenize", "count"),
}


def answer_of(path: str, body: Any) -> tuple[str, int]:
    """Return the text of an answer, and the number of tokens of its prompt."""
    match path:
        case "/v1/chat/completions":
            return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]
        case "/v1/responses":
            return body["output"][0]["content"][0]["text"], body["usage"]["input_tokens"]
        case "/v1/messages":
            return body["content"][0]["text"], body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"]
        case "/api/chat":
            return body["message"]["content"], body["prompt_eval_count"]
        case _:
            return body["response"], body["prompt_eval_count"]


def asked(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with greedy sampling."""
    if path.startswith("/api/"):
        return {**body, "stream": False, "options": {"num_predict": NUM_TOKENS, "temperature": 0}}
    length = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {**body, length: NUM_TOKENS, "temperature": 0}


@pytest.mark.parametrize(("path", "body", "text"), ASKED)
def test_every_protocol_gives_the_tokens_of_the_prompt(
    server: ServerProcess, expected: dict[str, tuple[str, int]], path: str, body: dict[str, Any], text: str
) -> None:
    response = server.post(path, asked(path, body))
    assert response.status_code == 200, response.text
    answer, num_tokens = answer_of(path, response.json())
    said, count = expected[text]
    assert num_tokens == count
    assert answer
    assert said.startswith(answer)
    if path in COUNTED:
        route, name = COUNTED[path]
        assert server.post(route, body).json()[name] == count
