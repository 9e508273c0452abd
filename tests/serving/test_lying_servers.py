"""Servers whose answers are damaged in hundreds of ways: each client gets a typed answer, or a stream with an end."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from quire.fleet.proxy.app import Proxy
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.routing.failure_policy import FailurePolicy
from quire.fleet.routing.router import RouterConfig
from quire.server.http.http_server import start_http
from quire.server.requests.body import BodyReader
from quire.server.settings import ServerConfig
from quire.server.state.auth import guarded
from quire.server.state.intake import Intake
from tests.server.hostile.runner import answers_of, problem_of
from tests.serving.lies import Lie, make_lie, whole

# Far above the limits of the policy; longer is no answer.
HANG_S = 30.0
POLICY = FailurePolicy(first_byte_timeout_s=1.0, idle_timeout_s=0.5)
AT_ONCE = 16
HONEST = json.dumps({"choices": [{"text": "honest"}]}).encode()
HEALTH = whole(b'{"status": "ok"}')
MODELS = whole(b'{"object": "list", "data": [{"id": "m"}]}')


class LyingServer:
    """A server that answers health queries, and lies otherwise until it is told to be honest."""

    def __init__(self, lie: Lie) -> None:
        self.lie = lie
        self.is_honest = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0]) if lengths else 0)
                path = head.split(b" ")[1].decode()
                fixed = {"/health": HEALTH, "/v1/models": MODELS}.get(path)
                if path in ("/prompt_tokens", "/kv_event_sources"):
                    fixed = whole(self.lie.tokens if path == "/prompt_tokens" else self.lie.kv_sources)
                if fixed is not None or self.is_honest:
                    writer.write(fixed or whole(HONEST))
                    continue
                for part in self.lie.parts:
                    writer.write(part)
                    await asyncio.sleep(0.005)
                if self.lie.end == "hold":
                    await reader.read()
                elif self.lie.end == "reset":
                    writer.transport.abort()
                break
        writer.close()


class Edge:
    """The router's HTTP edge with a proxy for each lie, which the header `x-case` names."""

    def __init__(self) -> None:
        self._proxies: dict[str, Intake] = {}
        self._bodies = BodyReader(1 << 20, 1 << 20)
        self.problems: list[str] = []
        self.statuses: set[int] = set()

    async def run(self, lies: list[Lie]) -> None:
        """Have each lie told, some at a time."""
        config = ServerConfig(port=0)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._address = listener.getsockname()
            http = await start_http(guarded(self._call, config), config, listener, 100)
            room = asyncio.Semaphore(AT_ONCE)

            async def check(lie: Lie) -> None:
                async with room:
                    await self._check(lie)

            await asyncio.gather(*map(check, lies))
            http.server.should_exit = True
            http.accepting.cancel()
            http.watching.cancel()
            await asyncio.gather(http.serving, http.accepting, http.watching, return_exceptions=True)
        self._bodies.close()
        # The router has closed its connections, so each server reads their ends.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        left = (await asyncio.wait(others, timeout=HANG_S))[1] if others else ()
        self.problems += [f"still runs: {task}" for task in left]

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = dict(scope["headers"])[b"x-case"].decode()
        await self._proxies[name](scope, receive, send)

    async def _check(self, lie: Lie) -> None:
        liar = LyingServer(lie)
        server = await asyncio.start_server(liar.serve, "127.0.0.1", 0, limit=1 << 20)
        fleet = Fleet([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], None, 60.0, RouterConfig(), POLICY)
        proxy = Proxy(fleet, self._bodies)
        self._proxies[str(lie.number)] = Intake(proxy, bodies=self._bodies, admit=proxy.admit)
        await fleet.start()
        try:
            async with asyncio.timeout(HANG_S):
                self._judge(lie, await self._ask(lie))
                # No part of the lie is in the answer to the next request.
                liar.is_honest = True
                ((status, headers, body),) = answers_of(await self._ask(lie))
                # A connection that is held open may be used again, in vain.
                if status not in (503, 504) and (status, body) != (200, HONEST.decode()):
                    self._note(lie, f"the next answer is {status} {headers} {body[:200]!r}")
        except TimeoutError:
            self._note(lie, "no answer in time")
        except ValueError as error:
            self._note(lie, f"the next answer is not HTTP: {error}")
        finally:
            await fleet.stop()
            server.close()

    async def _ask(self, lie: Lie) -> bytes:
        body = json.dumps({"prompt": "a", "messages": [], "stream": lie.is_stream, "model": "m"}).encode()
        head = f"POST {lie.path} HTTP/1.1\r\nHost: localhost\r\nX-Case: {lie.number}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        reader, writer = await asyncio.open_connection(*self._address)
        try:
            writer.write(head.encode() + body)
            return await reader.read()
        finally:
            writer.close()

    def _judge(self, lie: Lie, raw: bytes) -> None:
        try:
            ((status, headers, body),) = answers_of(raw, errors="replace")
        except ValueError as error:
            self._note(lie, f"not one whole answer ({error}): {raw[:300]!r}")
            return
        self.statuses.add(status)
        names = {name.lower() for name in headers}
        if "set-cookie" in names:
            self._note(lie, f"a header was injected: {headers}")
        problem: Any = None
        is_stream = headers.get("content-type", "").lower().startswith(("text/event-stream", "application/x-ndjson"))
        if "x-quire-replica" not in names:
            # The router's own errors: typed, and never that of an exception.
            if status not in (429, 502, 503, 504) or "internal_error" in body:
                problem = f"{status} {body[:300]!r}"
            else:
                fault = problem_of(status, headers, body, has_body=True)
                problem = fault if fault is not None and not fault.startswith(f"{status}: ") else None
        elif is_stream and status == 200:
            # The name of an event is enough: a lie may have changed its data.
            last = body.replace("\r\n", "\n").replace("\r", "\n").rstrip().rpartition("\n\n")[2].rpartition("}\n{")[2]
            if not any(mark in last for mark in ("event: message_stop", "[DONE]", '"done": true', '"error"')):
                problem = f"a stream without an end: {body[-300:]!r}"
        if problem is not None:
            self._note(lie, str(problem))

    def _note(self, lie: Lie, what: str) -> None:
        self.problems.append(f"#{lie.number} {lie.path} {lie.end}: {what}\n    {b'|'.join(lie.parts)[:400]!r}")


def tell(seed: int, count: int, caplog: pytest.LogCaptureFixture) -> None:
    """Have lies told, and fail where a client got what it should not."""
    edge = Edge()
    unhandled: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await edge.run([make_lie(seed, number) for number in range(count)])

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert not edge.problems, f"{len(edge.problems)}:\n" + "\n".join(edge.problems[:10])
    assert not unhandled, unhandled[:3]
    assert not [record for record in caplog.records if record.name.startswith("quire")], caplog.text[:3000]
    assert {200, 502} <= edge.statuses


def test_a_lie_is_a_function_of_seed_and_number() -> None:
    assert [make_lie(1, number) for number in range(50)] == [make_lie(1, number) for number in range(50)]
    assert len({lie.parts[0] for lie in (make_lie(1, number) for number in range(50))}) > 30


def test_some_lies_get_a_typed_answer_or_a_stream_with_an_end(caplog: pytest.LogCaptureFixture) -> None:
    tell(1, 80, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_many_lies_get_a_typed_answer_or_a_stream_with_an_end(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    tell(seed, 400, caplog)
