"""A proxy in simulated time: the real one, before servers that are simulated, on a loop whose clock jumps.

No test of it sleeps: when nothing is ready, the clock jumps to the next timer. If there is no timer, everything waits
for ever, which is an error.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from quire.fleet.proxy.app import Proxy
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.upstream import UpstreamLost
from quire.fleet.routing.failure_policy import FailurePolicy
from quire.fleet.routing.router import RouterConfig
from quire.server.requests.body import BodyReader
from quire.server.requests.errors import IS_OPERATOR, api_error

PATH = "/v1/completions"


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while nothing is ready."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.now_s


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("everything waits for ever")
        self._loop.now_s += max(0.0, timeout)
        return super().select(0)


def run_simulated(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(main)


@dataclass
class Reply:
    """What a simulated server does with one request.

    Args:
        status: of the answer.
        after_s: time until its head.
        parts: of its body.
        part_s: time before each part.
        kills: True if the server ends in place of the answer.
        is_stream: True for a stream of events.
    """

    status: int = 200
    after_s: float = 0.05
    parts: Sequence[bytes] = (b'{"choices": []}',)
    part_s: float = 0.0
    kills: bool = False
    is_stream: bool = False


Behave = Callable[[dict[str, Any]], Reply]


@dataclass
class SimulatedServer:
    """A server, in place of the connections to a real one.

    Args:
        behave: what it does with the fields of a request.
        restart_s: time after which it is back once it was killed.
        routes: answers to requests of the proxy itself, by their path.
        hangs: paths of such requests that are never answered.
        refuses: True while it takes no new connections, but answers the requests that it has.
    """

    behave: Behave
    restart_s: float = 3.0
    host: str = "simulated"
    is_alive: bool = True
    num_killed: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    own: list[str] = field(default_factory=list)
    routes: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    hangs: set[str] = field(default_factory=set)
    refuses: bool = False
    in_flight: set[asyncio.Future[None]] = field(default_factory=set)

    def kill(self) -> None:
        if not self.is_alive:
            return
        self.is_alive = False
        self.num_killed += 1
        self.abort()
        asyncio.get_running_loop().call_later(self.restart_s, self._restart)

    def _restart(self) -> None:
        self.is_alive = True

    def abort(self) -> None:
        for waiting in tuple(self.in_flight):
            if not waiting.done():  # its own time may be over in this very turn of the loop
                waiting.set_exception(UpstreamLost("the server closed the connection"))

    async def pause(self, seconds: float) -> None:
        """Let time pass for a request, until the server is killed."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()
        self.in_flight.add(ended)
        timer = loop.call_later(seconds, _end, ended)
        try:
            await ended
        finally:
            timer.cancel()
            self.in_flight.discard(ended)

    async def request(self, _method: str, target: bytes, _headers: Any, body: bytes = b"") -> SimulatedAnswer:
        if not self.is_alive or self.refuses:
            raise UpstreamLost("cannot connect: refused", was_sent=False, is_refused=True)
        if target.decode() in self.routes:
            status, answer = self.routes[target.decode()]
            return SimulatedAnswer(self, Reply(status, parts=[answer]))
        fields = json.loads(body or b"{}")
        self.asked.append(fields)
        reply = self.behave(fields)
        await self.pause(reply.after_s)
        if reply.kills:
            self.kill()
            raise UpstreamLost("the server closed the connection")
        return SimulatedAnswer(self, reply)

    async def fetch(
        self, method: str, path: str, _headers: Any = (), body: bytes = b"", *, timeout_s: float, **_: int
    ) -> tuple[int, bytes]:
        if not self.is_alive or self.refuses:
            raise UpstreamLost("cannot connect: refused", was_sent=False, is_refused=True)
        self.own.append(f"{method} {path} {body.decode()}".strip())
        if path in self.hangs:
            await asyncio.sleep(timeout_s)
            raise UpstreamLost("no answer in time")
        return self.routes.get(path, (200, b"{}") if path == "/health" else (404, b"{}"))


def _end(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class SimulatedAnswer:
    def __init__(self, server: SimulatedServer, reply: Reply) -> None:
        self.status = reply.status
        kind = b"text/event-stream" if reply.is_stream else b"application/json"
        self.headers = [(b"content-type", kind)]
        self._server = server
        self._reply = reply

    def header(self, name: bytes) -> bytes:
        return dict(self.headers).get(name, b"")

    async def parts(self) -> AsyncIterator[bytes]:
        for part in self._reply.parts:
            await self._server.pause(self._reply.part_s)
            yield part

    def close(self) -> None:
        pass


@dataclass
class Got:
    """What a client got.

    Args:
        status: of the answer, 0 for none.
        body: of the answer.
        replica: that answered.
        seconds: until the end.
    """

    status: int
    body: bytes
    replica: str
    seconds: float

    @property
    def code(self) -> str | None:
        """The code of the error of an answer in OpenAI's form, or of the event that ends a stream with an error."""
        for line in self.body.decode().splitlines():
            with suppress(ValueError, AttributeError):
                code = json.loads(line.removeprefix("data: ")).get("error", {}).get("code")
                if code:
                    return str(code)
        return None


class SimulatedProxy:
    """The real proxy before simulated servers."""

    def __init__(
        self, servers: Sequence[SimulatedServer], policy: FailurePolicy | None = None, *, router: str = "cache_aware"
    ) -> None:
        self.servers = servers
        names = [f"http://server-{idx}" for idx in range(len(servers))]
        self.fleet = Fleet(names, None, 1.0, RouterConfig(policy=router), policy)
        for name, server in zip(names, servers, strict=True):
            self.fleet.replicas[name].upstream = server  # type: ignore[assignment]
        self._bodies = BodyReader(1 << 20, 1 << 20)
        self.proxy = Proxy(self.fleet, self._bodies)

    async def __aenter__(self) -> SimulatedProxy:
        await self.fleet.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.stop()
        self._bodies.close()

    async def post(self, path: str = PATH, leave_after_s: float | None = None, **fields: Any) -> Got:
        return await self._request("POST", path, json.dumps(fields).encode(), leave_after_s)

    async def state(self) -> dict[str, Any]:
        """Return the answer to `GET /router/replicas`."""
        state: dict[str, Any] = json.loads((await self.get("/router/replicas")).body)
        return state

    async def get(self, path: str) -> Got:
        return await self._request("GET", path, b"", None)

    async def _request(self, method: str, path: str, body: bytes, leave_after_s: float | None) -> Got:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Message] = []

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await asyncio.sleep(1e9 if leave_after_s is None else leave_after_s)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "query_string": b""}
        scope |= {"headers": headers, IS_OPERATOR: True}
        try:
            await self.proxy(scope, receive, send)
        except Exception as error:
            if sent:
                raise
            known = api_error(error, "")
            return Got(known.status, json.dumps(known.body()).encode(), "", loop.time() - started_s)
        if not sent:
            return Got(0, b"", "", loop.time() - started_s)
        assert not sent[-1].get("more_body", False), "the answer has no end"
        text = b"".join(message.get("body", b"") for message in sent)
        replica = dict(sent[0]["headers"]).get(b"x-quire-replica", b"").decode()
        return Got(sent[0]["status"], text, replica, loop.time() - started_s)


def statuses(got: Sequence[Got]) -> Counter[int]:
    return Counter(each.status for each in got)
