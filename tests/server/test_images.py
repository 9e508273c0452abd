"""Images over HTTP: every protocol gives the tokens of the same prompt, and refuses by name what is no image."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from quire import LLM, SamplingParams
from tests.images.tiny_model import PAD, data_url, in_base64, picture, save, url_part
from tests.server.hostile import forms
from tests.server.process import PATIENCE_S, ServerProcess, running

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


def test_the_clients_of_each_protocol_send_images(server: ServerProcess, expected: dict[str, tuple[str, int]]) -> None:
    said, _ = expected[BOTH]
    messages: Any = [{"role": "user", "content": both_parts()}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        pieces = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=NUM_TOKENS, temperature=0, stream=True
        )
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text
        assert said.startswith(text)
        content: Any = ASKED[2][1]["input"]
        response = client.responses.create(model="tiny", input=content, max_output_tokens=NUM_TOKENS, temperature=0)
        assert response.output_text == text
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=PATIENCE_S) as other:
        content = ASKED[4][1]["messages"]
        message = other.messages.create(
            model="tiny", messages=content, max_tokens=NUM_TOKENS, extra_body={"temperature": 0}
        )
        assert message.content[0].text == text  # type: ignore[union-attr]
    options = {"num_predict": NUM_TOKENS, "temperature": 0}
    with ollama.Client(server.url) as third:
        turn = {"role": "user", "content": "What are these?", "images": [FIRST, SECOND]}
        line = third.chat("tiny", [turn], options=options)
    assert line.message.content == text
    assert "vision" in server.post("/api/show", {"model": "tiny"}).json()["capabilities"]


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


URL = "messages[0].content[0].image_url.url"


def bomb() -> bytes:
    """Return a PNG that says that it has 60,000 x 60,000 pixels."""
    small = picture(8, 8, 0)
    head = small[12:16] + (60_000).to_bytes(4, "big") * 2 + small[24:29]
    return small[:12] + head + zlib.crc32(head).to_bytes(4, "big") + small[33:]


# The part, the name of the field at fault, and words of the error.
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (url_part(FIRST[:100]), URL, "must be an image of PNG, JPEG, WEBP or GIF"),
    (url_part(bomb()), URL, "60000x60000 pixels, more than"),
    (url_part(b"GIF89a"), URL, "must be an image"),
    (url_part(b""), URL, "must be an image"),
    (image_url("data:image/png;base64,abc"), URL, "base64"),
    (image_url("data:image/png;base64," + "A" * 7 + "=" + "A" * 8), URL, "base64"),
    (image_url("data:text/plain,hello"), URL, "must be a data URL in base64"),
    (image_url("data:text/plain;base64,aGVsbG8="), URL, "must be an image"),
    (image_url("http://example.com/a.png"), URL, "not from this host"),
    (image_url("https://127.0.0.1/a.png"), URL, "not from this host"),
    (image_url("http://a.test:99999/a.png"), URL, "must be a URL"),
    (image_url("file:///etc/passwd"), URL, "--allowed-local-media-path names a folder"),
    (image_url("/etc/passwd"), URL, "must be a data, file, http or https URL"),
    ({"type": "image_url", "image_url": {"url": 5}}, URL, "must be a data, http or https URL"),
    (url_part(FIRST, detail="ultra"), "messages[0].content[0].image_url.detail", "must be one of auto, high, low"),
    ({"type": "image", "image": "/etc/passwd"}, "messages[0].content[0].image", "the type image_url is for URLs"),
    ({"type": "image", "image": ["/etc/passwd"]}, "messages[0].content[0].image", "must be bytes"),
    ({"type": "image", "image": {"form": "url"}}, "messages[0].content[0].image", "must be bytes"),
    ({"type": "video_url", "video_url": {"url": "a"}}, "messages[0].content[0].type", "no parts of type 'video_url'"),
    ({"type": "input_audio", "input_audio": {}}, "messages[0].content[0].type", "no parts of type 'input_audio'"),
]


@pytest.mark.parametrize(("part", "field", "words"), REFUSED)
def test_what_is_no_image_is_a_400_that_names_the_part(
    server: ServerProcess, part: dict[str, Any], field: str, words: str
) -> None:
    response = server.post("/v1/chat/completions", {**GREEDY, "messages": [{"role": "user", "content": [part]}]})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert words in error["message"]


def test_each_protocol_names_its_own_field(server: ServerProcess) -> None:
    cut, many = in_base64(FIRST[:100]), [url_part(FIRST)] * 30
    source = {"type": "base64", "media_type": "image/png", "data": cut}
    user: dict[str, Any] = {"role": "user", "content": [{"type": "input_image", "image_url": data_url(FIRST[:100])}]}
    for path, body, field in (
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": many}]},
            URL.replace("content[0]", "content[16]"),
        ),
        ("/v1/responses", {"input": [user]}, "input[0].content[0].image_url"),
        (
            "/v1/responses",
            {"input": [user | {"content": [{"type": "input_image", "file_id": "a"}]}]},
            "input[0].content[0].file_id",
        ),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
            "messages[0].content[0].source.data",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": source | {"media_type": "image/bmp"}}]}
                ]
            },
            "messages[0].content[0].source.media_type",
        ),
        (
            "/v1/messages",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "a"}}]}
                ]
            },
            "messages[0].content[0].source.type",
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]},
            "messages[0].content[0].source.data",
        ),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": [in_base64(FIRST), cut]}]},
            "messages[0].images[1]",
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": "a"}]}, "messages[0].images"),
        ("/api/generate", {"prompt": "a", "images": [cut]}, "images[0]"),
        ("/api/generate", {"prompt": "a", "images": [cut], "raw": True}, "images"),
        ("/v1/embeddings", {"input": [image_url("a")]}, "input[0]"),
        ("/v1/completions", {"prompt": {"prompt": "a", "multi_modal_data": {"image": cut}}}, "prompt"),
    ):
        response = server.post(path, asked(path, body))
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert response.status_code == 400, message
        assert message.startswith(f"{field} "), message


def test_hostile_parts_are_refused(server: ServerProcess) -> None:
    rng = Random(45)
    for _ in range(120):
        part = forms.image(rng)
        content = [part] if rng.random() < 0.5 else [part, {"type": "text", "text": "a"}]
        turn = {"role": rng.choice(["user", "user", "tool"]), "content": content, "tool_call_id": "a"}
        path, body = rng.choice(
            [
                ("/v1/chat/completions", {"messages": [turn]}),
                ("/v1/messages", {"messages": [turn]}),
                ("/v1/responses", {"input": [turn]}),
                ("/tokenize", {"messages": [turn]}),
                ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": [*part.values()]}]}),
                ("/api/generate", {"prompt": "a", "images": part.get("image_url", ["a"])}),
            ]
        )
        response = server.post(path, asked(path, body))
        assert response.status_code in (200, 400), (path, body, response.text)
        # Heads of files without an image, and what names none.
        assert "passwd" not in response.text or response.status_code == 400
    server.wait_until_idle()


def test_streams_go_on_beside_images(server: ServerProcess) -> None:
    """A stream of text has all its tokens while large and hostile images are decoded beside it."""
    body = {"messages": [{"role": "user", "content": "Go."}], "stream": True, **GREEDY, "max_tokens": 60}
    hostile = [url_part(bomb()), url_part(picture(900, 600, 1, "WEBP")[:50_000]), url_part(picture(1500, 1000, 1))]
    statuses: list[int] = []

    def attack() -> None:
        for part in hostile:
            answer = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={"messages": [{"role": "user", "content": [part]}], "max_tokens": 1},
                timeout=PATIENCE_S,
            )
            statuses.append(answer.status_code)

    thread = threading.Thread(target=attack)
    thread.start()
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    thread.join()
    assert json.loads(lines[-1][6:])["choices"][0]["finish_reason"] == "length"
    assert statuses == [400, 400, 400]
    server.wait_until_idle()


def test_the_server_never_imports_pillow(server: ServerProcess) -> None:
    """The libraries of an extension module are in the process' map of memory."""
    pid = server.process.pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "torch" in maps
    assert "PIL" not in maps


def test_the_list_of_models_says_what_they_read(server: ServerProcess) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]
