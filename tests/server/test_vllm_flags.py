"""Flags of vLLM's server that change answers: several names, a template of the operator's, a Unix domain socket."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.address import bind_unix

TEMPLATE = "{{ bos_token }}{{ topic }}:{% for message in messages %} {{ message.content }}{% endfor %}"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "rain"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server on the bundled model, with all of these flags, and a client of its socket."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    path = str(folder / "socket")
    command = [sys.executable, "-m", "quire", "serve", "--uds", path, "--served-model-name", "one", "two"]
    command += ["--chat-template", str(folder / "template.jinja"), "--num-threads", "1", "--log-level", "warning"]
    command += ["--default-chat-template-kwargs", '{"topic": "weather"}']
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert re.search(re.escape(f"Quire serves one at unix:{path}"), process.stdout.readline())
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost", timeout=60) as client:
            yield client
        process.send_signal(signal.SIGINT)


def test_each_name_is_served_and_answers_have_the_first(server: httpx.Client) -> None:
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["one", "two"]
    for name in ("one", "two"):
        answer = server.post("/v1/chat/completions", json={**ASK, "model": name})
        assert (answer.status_code, answer.json()["model"]) == (200, "one")
    assert server.post("/v1/chat/completions", json={**ASK, "model": "three"}).status_code == 404


def test_conversations_follow_the_operators_template(server: httpx.Client) -> None:
    def text(**more: Any) -> str:
        tokens = server.post("/tokenize", json={**ASK, **more}).json()["tokens"]
        return str(server.post("/detokenize", json={"tokens": tokens}).json()["prompt"])

    assert text().endswith("weather: rain")
    assert text(chat_template_kwargs={"topic": "news"}).endswith("news: rain")


def test_a_socket_in_use_is_refused_and_a_stale_one_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with bind_unix(path) as first:
        first.listen()
        with pytest.raises(ConfigError, match="another server listens there"):
            bind_unix(path)
    with bind_unix(path) as second:
        assert second.family == socket.AF_UNIX
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot listen on uds"):
        bind_unix(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text(encoding="utf-8") == "kept"
