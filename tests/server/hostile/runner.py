"""Sends hostile requests to a server process together with harmless ones, and reports whatever should not happen."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.server.hostile.bodies import MAX_BODY, Case
from tests.server.process import ServerProcess

# An answer that takes longer counts as none.
HANG_S = 10.0
# Between two harmless requests of a kind.
PAUSE_S = 0.02
# What clients may be told of a server that has too much to do.
BUSY = {"too_many_uploads", "too_many_connections", "stopping", "busy"}
# Beginnings of the messages of faults of the server, in protocols without codes.
FAILED = ("the server failed", "the engine failed")
# Types of the events that end the streams of Anthropic's Messages and of OpenAI's Responses.
LAST = ("message_stop", "response.completed", "response.incomplete", "error")
FLAGS = (
    *("--num-kv-blocks", "600", "--max-num-seqs", "32", "--max-model-len", "512", "--max-queue-len", "256"),
    *("--max-body-bytes", str(MAX_BODY), "--pin-limit", "0.1", "--swap-space", "4MiB", "--grammar-timeout-s", "1"),
)
HARMLESS = {
    "whole": {"prompt": "Z", "max_tokens": 8, "temperature": 0},
    "stream": {"prompt": "Z", "max_tokens": 8, "temperature": 0, "stream": True},
}


@dataclass(slots=True)
class Report:
    """What came of a run.

    Args:
        statuses: answers by status; 0 for none.
        problems: what should not have happened, with the request's number and kind.
        quiet_s, delays_s: seconds that harmless requests took before the attack, and during it, by kind.
        slowest: of the harmless requests during it, the slowest last: seconds, and the hostile ones beside each.
        memory: bytes of the server process before, at most, and afterwards.
        seconds: of the attack.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    quiet_s: dict[str, list[float]] = field(default_factory=dict)
    delays_s: dict[str, list[float]] = field(default_factory=dict)
    slowest: list[tuple[float, list[str]]] = field(default_factory=list)
    memory: tuple[int, int, int] = (0, 0, 0)
    seconds: float = 0.0

    @property
    def growth(self) -> int:
        """Bytes that the process has more than before."""
        return self.memory[2] - self.memory[0]


class Attack:
    """One run against one server.

    Args:
        server: with `FLAGS`, or a router before it; nothing else asks it anything.
        num_attackers: hostile requests at a time.
        settle_s: time in which memory is given back before it is measured.
    """

    def __init__(self, server: ServerProcess, num_attackers: int = 4, *, settle_s: float = 2.0) -> None:
        self._server = server
        self._settle_s = settle_s
        self._num_attackers = num_attackers
        self._beside: dict[int, str] = {}
        host, _, port = server.url.removeprefix("http://").partition(":")
        self._address = host, int(port)
        self._expected = {
            kind: self._text(server.post("/v1/completions", body).text) for kind, body in HARMLESS.items()
        }
        self._times: dict[str, list[float]] = {}
        self._peak = 0
        self.report = Report()

    async def run(
        self, cases: Iterable[Future[Case]], warm_up: Iterable[Future[Case]] = (), *, quiet_s: float = 1.0
    ) -> Report:
        """Send requests and return what came of them.

        Args:
            cases: the requests, as they are made.
            warm_up: others, sent first, so that what is started on demand is there when memory is measured.
            quiet_s: time for harmless requests alone.
        """
        await self._attack(iter(warm_up))
        before = await self._settled()
        beside = [asyncio.create_task(self._harmless(kind)) for kind in HARMLESS]
        beside += [asyncio.create_task(self._probe()), asyncio.create_task(self._watch())]
        self._times = self.report.quiet_s
        await asyncio.sleep(quiet_s)
        self._times, started_s = self.report.delays_s, time.monotonic()
        self._peak = before
        await self._attack(iter(cases))
        self.report.seconds = time.monotonic() - started_s
        for task in beside:
            task.cancel()
        for problem in await asyncio.gather(*beside, return_exceptions=True):
            if not isinstance(problem, asyncio.CancelledError):
                self._note(f"a harmless request: {problem!r}")
        self.report.memory = before, self._peak, await self._settled()
        self._look_at_the_log()
        return self.report

    # ---- requests ----

    async def _attack(self, cases: Iterator[Future[Case]]) -> None:
        await asyncio.gather(*(self._send_all(cases) for _ in range(self._num_attackers)))

    async def _send_all(self, cases: Iterator[Future[Case]]) -> None:
        for future in cases:
            case = await asyncio.wrap_future(future)
            self._beside[case.number] = f"#{case.number} {case.kind}"
            try:
                async with asyncio.timeout(HANG_S):
                    raw = await self._exchange(case.raw, None if case.wants_answer else 0.05)
                self._judge(case, raw)
            except TimeoutError:
                self._note(f"no answer in {HANG_S:g} s", case)
            except OSError as error:
                self._note(f"no connection: {error}", case)
            del self._beside[case.number]

    async def _harmless(self, kind: str) -> None:
        raw = _request("POST", "/v1/completions", HARMLESS[kind])
        while True:
            status, body = await self._ask(kind, raw)
            if status != 200 or self._text(body) != self._expected[kind]:
                self._note(f"a harmless request beside it: {status} {body[:300]!r}")
            await asyncio.sleep(PAUSE_S)

    async def _probe(self) -> None:
        raw = _request("GET", "/health", None)
        while True:
            status, body = await self._ask("/health", raw)
            if status != 200:
                self._note(f"/health beside it: {status} {body[:300]!r}")
            await asyncio.sleep(PAUSE_S)

    async def _ask(self, kind: str, raw: bytes) -> tuple[int, str]:
        """Send a harmless request, and time it; return the status and body of its answer, without one 0 and why."""
        since, beside = time.monotonic(), dict(self._beside)
        try:
            async with asyncio.timeout(HANG_S):
                ((status, _, body),) = answers_of(await self._exchange(raw))
        except (TimeoutError, OSError, ValueError) as error:
            return 0, repr(error)
        self._time(kind, since, beside)
        return status, body

    async def _watch(self) -> None:
        while True:
            self._peak = max(self._peak, self._memory())
            await asyncio.sleep(0.05)

    async def _exchange(self, raw: bytes, patience_s: float | None = None) -> bytes:
        """Send bytes on a connection of their own, and return what comes.

        Args:
            patience_s: after which nothing more is waited for; None waits for the end.
        """
        reader, writer = await asyncio.open_connection(*self._address)
        got = b""
        try:
            writer.write(raw)
            async with asyncio.timeout(patience_s):
                while part := await reader.read(1 << 16):
                    got += part
        except ConnectionError:
            pass  # an answer may come before all was sent
        except TimeoutError:
            if patience_s is None:
                raise
        finally:
            writer.transport.abort()
        return got

    # ---- what is found ----

    def _judge(self, case: Case, raw: bytes) -> None:
        try:
            # What is no HTTP has no method: its answer has a body, whatever it begins with.
            has_body = not case.raw.startswith(b"HEAD ") or b"invalid_http" in raw
            answers = answers_of(raw, has_body=has_body)
        except ValueError as error:
            if case.wants_answer:  # else it was not waited for until its end
                self._note(f"an answer that is not HTTP ({error}): {raw[:200]!r}", case)
            return
        if case.wants_answer and not answers:
            self.report.statuses[0] += 1
            self._note("no answer", case)
        for status, headers, body in answers:
            self.report.statuses[status] += 1
            problem = problem_of(status, headers, body, has_body=has_body)
            if problem is not None and (case.wants_answer or status >= 500):
                self._note(problem, case)

    def _time(self, kind: str, since: float, beside: dict[int, str]) -> None:
        took_s = time.monotonic() - since
        self._times.setdefault(kind, []).append(took_s)
        if self._times is self.report.delays_s:
            self.report.slowest = sorted([*self.report.slowest, (took_s, [*(beside | self._beside).values()])])[-8:]

    def _note(self, what: str, case: Case | None = None) -> None:
        about = "" if case is None else f"#{case.number} {case.kind}: "
        shown = "" if case is None else f"\n    {case.raw[:200]!r}"
        self.report.problems.append(f"{about}{what}{shown}")

    def _look_at_the_log(self) -> None:
        log = self._server.log.read_text()
        for bad in ("Traceback", " ERROR ", "Exception ignored"):
            if bad in log:
                place = log.index(bad)
                self._note(
                    f"the log has {bad.strip()!r} ({log.count(bad)} times): {log[max(0, place - 100) : place + 1500]}"
                )
        if self._server.process.poll() is not None:
            self._note(f"the server has ended with {self._server.process.returncode}")

    async def _settled(self) -> int:
        """Wait until nothing runs and what is given back late was given back, and return the memory then."""
        # Blocks that were pinned stay.
        is_idle = lambda status: not status["requests"] and status["memory"]["num_sequences"] == 0  # noqa: E731
        await asyncio.to_thread(self._server.wait_until, is_idle)
        await asyncio.sleep(self._settle_s)
        return self._memory()

    def _memory(self) -> int:
        fields = Path(f"/proc/{self._server.process.pid}/status").read_text().partition("VmRSS:")[2]
        return int(fields.split()[0]) << 10 if fields else 0

    def _text(self, body: str) -> str:
        """Return the text of a harmless request's answer, whole or streamed."""
        if not body.startswith("data: "):
            return str(json.loads(body)["choices"][0]["text"])
        events = [line[6:] for line in body.splitlines() if line.startswith("data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def _request(method: str, path: str, body: Any) -> bytes:
    raw = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    )
    return f"{head}\r\nConnection: close\r\n\r\n".encode() + raw


def answers_of(
    raw: bytes, *, has_body: bool = True, errors: str = "strict"
) -> list[tuple[int, Mapping[str, str], str]]:
    """Return status, headers and body of each answer.

    Raises:
        ValueError: the bytes are not HTTP.
    """
    stream = io.BytesIO(raw)
    stream.close = lambda: None  # type: ignore[method-assign]  # each answer would close it
    found: list[tuple[int, Mapping[str, str], str]] = []
    while stream.tell() < len(raw):
        answer = http.client.HTTPResponse(_Socket(stream), method="GET" if has_body else "HEAD")  # type: ignore[arg-type]
        try:
            answer.begin()
            body = answer.read()
        except http.client.HTTPException as error:
            raise ValueError(repr(error)) from error
        found.append((answer.status, dict(answer.headers), body.decode(errors=errors)))
    return found


class _Socket:
    def __init__(self, stream: io.BytesIO) -> None:
        self._stream = stream

    def makefile(self, _mode: str) -> io.BytesIO:
        return self._stream


def problem_of(status: int, headers: Mapping[str, str], body: str, *, has_body: bool) -> str | None:
    """Return what is wrong with an answer, None where nothing is."""
    kind = {name.lower(): value for name, value in headers.items()}.get("content-type", "")
    try:
        if kind.startswith(("text/event-stream", "application/x-ndjson")):
            lines = body.splitlines() if "ndjson" in kind else [x[6:] for x in body.splitlines() if x[:6] == "data: "]
            events = [json.loads(line) for line in lines if line != "[DONE]"]
            last = events[-1] if events else {}
            if lines[-1:] != ["[DONE]"] and not (last.get("type") in LAST or last.get("done") or "error" in last):
                return f"a stream without an end: {body[-200:]!r}"
            failed = [event for event in events if "error" in event]
            return next((f"an error in a stream: {event}" for event in failed if _is_our_fault(event)), None)
        if status < 400:
            if kind.startswith("application/json") and body:
                json.loads(body)
            return None
        if not body and not has_body:
            return None  # to HEAD
        answer = json.loads(body)
    except ValueError:
        return f"{status} with what is not JSON: {body[:200]!r}"
    if not isinstance(answer, dict) or not _has_form(answer):
        return f"{status} in another form: {body[:200]!r}"
    if "Traceback" in body or '.py"' in body:
        return f"{status} that shows the inside: {body[:500]!r}"
    return f"{status}: {body[:300]}" if status >= 500 and _is_our_fault(answer) else None


def _has_form(answer: Mapping[str, Any]) -> bool:
    """Return whether an error has the form of OpenAI, Anthropic or Ollama."""
    error = answer.get("error")
    if isinstance(error, str):
        return set(answer) == {"error"} and error != ""
    keys = {"message", "type"} if answer.get("type") == "error" else {"message", "type", "param", "code"}
    return isinstance(error, dict) and set(error) == keys and error["message"] != ""


def _is_our_fault(answer: Mapping[str, Any]) -> bool:
    error = answer["error"]
    if not isinstance(error, dict):
        return str(error).startswith(FAILED)
    ours = ("server_error", "service_unavailable_error")
    return error.get("code") not in BUSY and (error.get("type") in ours or error["message"].startswith(FAILED))
