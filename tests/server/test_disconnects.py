"""A client that leaves frees what it held, in every state; and many clients at once."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import openai
import pytest

from tests.server.checkpoint import SAYING
from tests.server.process import PATIENCE_S, ServerProcess
from tests.server.raw import connect, post

LONG: dict[str, Any] = {"prompt": "Z", "max_tokens": 4000, "ignore_eos": True}


def send(server: ServerProcess, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and return the connection, without reading the answer."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    raw = json.dumps(body).encode()
    key = server.http.headers.get("authorization")
    authorization = "" if key is None else f"Authorization: {key}\r\n"
    connection = socket.create_connection((host, int(port)), PATIENCE_S)
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\n{authorization}Content-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n".encode()
        + raw
    )
    return connection


def num_aborted(server: ServerProcess) -> int:
    """Return how many requests of the engine ended before their time."""
    lines = server.http.get("/metrics").text.splitlines()
    (line,) = (line for line in lines if "request_success_total" in line and 'finished_reason="abort"' in line)
    return int(float(line.split()[-1]))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/pin_prefix"])
@pytest.mark.parametrize("is_reset", [False, True])
def test_disconnect_during_the_upload_logs_nothing(server: ServerProcess, path: str, is_reset: bool) -> None:
    before = server.log.read_text()
    whole = post(path, {"prompt": "Z" * 1000})
    for num_bytes in (len(whole) - 1, len(whole) - 900):
        with connect(server) as connection:
            connection.sendall(whole[:num_bytes])
            if is_reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert server.http.get("/health").status_code == 200
    server.wait_until_idle()
    assert "ERROR" not in server.log.read_text()[len(before) :]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_while_tokens_are_made(server: ServerProcess, streamed: bool, n: int) -> None:
    before = num_aborted(server)
    with send(server, "/v1/completions", {**LONG, "stream": streamed, "n": n}):
        status = server.wait_until(lambda status: any(row["completion_tokens"] > 3 for row in status["requests"]))
        assert status["memory"]["used"] > 0
    server.wait_until_idle()
    assert num_aborted(server) == before + 1


@pytest.mark.parametrize("streamed", [False, True])
def test_disconnect_while_the_prompts_are_computed(server: ServerProcess, streamed: bool) -> None:
    # Different prompts of 4,000 tokens take eight steps each; no cache helps.
    prompts = [[10 + number] * 4000 for number in range(6)]
    before, num_steps = num_aborted(server), server.status()["engine"]["num_steps"]
    with send(server, "/v1/completions", {**LONG, "prompt": prompts, "max_tokens": 90, "stream": streamed}):
        server.wait_until(lambda status: status["engine"]["num_steps"] > num_steps)
    server.wait_until_idle()
    assert num_aborted(server) == before + len(prompts)


@pytest.mark.parametrize("streamed", [False, True])
def test_disconnect_while_waiting_in_the_queue(narrow_server: ServerProcess, streamed: bool) -> None:
    narrow_server.wait_until_idle()
    with send(narrow_server, "/v1/completions", {**LONG, "stream": True}):
        narrow_server.wait_until(lambda status: status["engine"]["num_running"] == 1)
        with send(
            narrow_server, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": streamed}
        ):
            narrow_server.wait_until(lambda status: status["engine"]["num_waiting"] == 1)
        status = narrow_server.wait_until(lambda status: status["engine"]["num_waiting"] == 0)
        assert len(status["requests"]) == 1
        assert status["engine"]["num_running"] == 1
    narrow_server.wait_until_idle()


def test_disconnect_of_the_openai_client(server: ServerProcess, client: openai.OpenAI) -> None:
    with client.completions.create(model="tiny", stream=True, prompt="Z", max_tokens=4000, temperature=0) as stream:
        next(iter(stream))
        assert len(server.status()["requests"]) == 1
    assert server.wait_until_idle()["engine"]["num_running"] == 0


def test_many_mixed_requests_at_once(server: ServerProcess) -> None:
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def completion(streamed: bool) -> str:
                options: dict[str, Any] = {"model": "tiny", "prompt": "Z", "max_tokens": 28, "temperature": 0}
                if not streamed:
                    return str((await client.completions.create(**options)).choices[0].text)
                stream = await client.completions.create(**options, stream=True)
                return "".join([chunk.choices[0].text async for chunk in stream])

            async def chat(streamed: bool) -> str:
                messages = [{"role": "user", "content": "hi"}]
                options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 28, "temperature": 0}
                if not streamed:
                    return str((await client.chat.completions.create(**options)).choices[0].message.content)
                stream = await client.chat.completions.create(**options, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            kinds = [completion, chat]
            return await asyncio.gather(*(kinds[number % 2](number % 4 < 2) for number in range(24)))

    assert set(asyncio.run(run())) == {SAYING + "abcdef"}
    status = server.wait_until_idle()
    assert status["memory"]["num_sequences"] == 0
