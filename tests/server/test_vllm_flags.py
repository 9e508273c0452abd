"""Flags of vLLM's server that change answers: several names, a template of the operator's, a Unix domain socket."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from quire.errors import ConfigError
from quire.server.http.address import bind, bind_unix, tls_context
from quire.server.http.connection import Connection, Connections
from quire.server.http.listener import accept_connections
from tests.server.process import PATIENCE_S, running

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


@pytest.mark.slow
def test_each_name_is_served_and_answers_have_the_first(server: httpx.Client) -> None:
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["one", "two"]
    for name in ("one", "two"):
        answer = server.post("/v1/chat/completions", json={**ASK, "model": name})
        assert (answer.status_code, answer.json()["model"]) == (200, "one")
    assert server.post("/v1/chat/completions", json={**ASK, "model": "three"}).status_code == 404


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def certificate_files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a certificate for this host and of its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"], check=True, capture_output=True)
    return certificate, key


@pytest.mark.slow
def test_a_server_with_a_certificate_has_encrypted_connections_only(
    folder: Path, tmp_path: Path, certificate_files: tuple[str, str]
) -> None:
    certificate, key = certificate_files
    flags = ("--num-kv-blocks", "100", "--ssl-certfile", certificate, "--ssl-keyfile", key)
    with running(folder, tmp_path / "log", *flags, verify=ssl.create_default_context(cafile=certificate)) as server:
        assert server.url.startswith("https://")
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health", timeout=PATIENCE_S)
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{server.url}/health", timeout=PATIENCE_S)
        assert server.http.get("/health").json()["status"] == "ok"


def test_encrypted_connections_are_served_and_others_are_not(certificate_files: tuple[str, str]) -> None:
    certificate, key = certificate_files
    context = tls_context(certificate, key)

    async def exchange() -> tuple[int, str]:
        connections = Connections(8, 5.0, 5.0, 5.0)
        settings = uvicorn.Config(answer_scheme, http=Connection, lifespan="off", log_config=None)
        settings.load()
        state = uvicorn.Server(settings).server_state
        with bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            accepting = asyncio.create_task(
                accept_connections(
                    listener,
                    connections,
                    lambda: Connection(connections, config=settings, server_state=state, app_state={}),
                    context,
                )
            )
            trusted = ssl.create_default_context(cafile=certificate)
            async with httpx.AsyncClient(verify=trusted) as client:
                with pytest.raises(httpx.HTTPError):
                    await client.get(f"http://localhost:{port}/")
                answer = await client.get(f"https://localhost:{port}/")
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
        return answer.status_code, answer.text

    assert asyncio.run(exchange()) == (200, "https")


async def answer_scheme(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - an ASGI application
    """Answer each request with the scheme that it came by."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})
