"""An image, audio, a video or a file in place of a text is refused by name, with the model's name, at every route."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.process import ServerProcess

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}}
FILE = {"type": "file", "file": {"file_data": "aGk="}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
TEXT = {"type": "text", "text": "What is this?"}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [TEXT, *parts]}]


# Route, body, name of the part, and its type.
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    *(
        ("/v1/chat/completions", {"messages": user(part)}, "messages[0].content[1].type", str(part["type"]))
        for part in (IMAGE, AUDIO, FILE, {"type": "video_url", "video_url": {"url": "http://a"}})
    ),
    ("/tokenize", {"messages": user(IMAGE)}, "messages[0].content[1].type", "image_url"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://a"}]}]},
        "input[0].content[0].type",
        "input_image",
    ),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "aGk="}]}]},
        "input[0].content[0].type",
        "input_file",
    ),
    ("/v1/messages", {"max_tokens": 4, "messages": user(BLOCK)}, "messages[0].content[1].type", "image"),
    ("/v1/messages/count_tokens", {"messages": user(BLOCK)}, "messages[0].content[1].type", "image"),
    (
        "/v1/messages",
        {"max_tokens": 4, "messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages[0].content[0].type",
        "document",
    ),
    (
        "/v1/messages",
        {
            "max_tokens": 4,
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [BLOCK]}]}
            ],
        },
        "messages[0].content[0].content[0].type",
        "image",
    ),
    (
        "/api/chat",
        {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]},
        "messages[0].images",
        "image",
    ),
    ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images", "image"),
    ("/api/embed", {"input": ["a", {"image": "aGk="}]}, "input[1]", "image"),
    ("/v1/completions", {"prompt": [IMAGE]}, "prompt[0]", "image_url"),
    ("/v1/embeddings", {"input": [IMAGE]}, "input[0]", "image_url"),
    ("/v1/embeddings", {"input": ["a", {"image": "http://a"}]}, "input[1]", "image"),
    ("/v1/embeddings", {"input": [{"content": [TEXT, IMAGE]}]}, "input[0].content[1]", "image_url"),
    ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c", "image": "d"}]}, "documents[1]", "image"),
    ("/v1/score", {"text_1": IMAGE, "text_2": "a"}, "text_1", "image_url"),
    ("/classify", {"input": [AUDIO]}, "input[0]", "input_audio"),
]


@pytest.mark.parametrize(("path", "body", "field", "kind"), CASES)
def test_the_part_and_the_model_are_named(
    hermes: ServerProcess, path: str, body: dict[str, Any], field: str, kind: str
) -> None:
    name = hermes.http.get("/v1/models").json()["data"][0]["id"]
    response = hermes.post(path, {"model": name, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    words = f"{field} is not supported: the model {name!r} reads no parts of type {kind!r} here"
    assert message == words
    if "param" in error:
        assert (error["param"], error["code"]) == (field, "unsupported_feature")


def test_a_stream_is_refused_before_it_begins(hermes: ServerProcess) -> None:
    response = hermes.post("/v1/chat/completions", {"messages": user(IMAGE), "stream": True})
    assert response.status_code == 400
    assert "reads no parts of type 'image_url' here" in json.loads(response.text)["error"]["message"]
    hermes.wait_until_idle()
