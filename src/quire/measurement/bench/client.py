"""A client of servers with OpenAI's API, which records the arrival time of each piece of an answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ServerUnreachable
from quire.measurement.bench.http_client import FAILURES, Endpoint, exchange, reason
from quire.measurement.bench.trace import TracedRequest
from quire.measurement.bench.workloads import BenchRequest

COMPLETED = "completed"
CHECK_TIMEOUT_S = 30.0
# Words that most vocabularies have as one token.
TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father power"
)
WORDS = tuple(TEXT.split())


@dataclass(slots=True)
class Outcome:
    """The outcome of one request; times are in seconds of a monotonic clock.

    Args:
        due_s: time at which the request was due; latencies count from here.
        sent_s: time at which the request was sent.
        kind: `COMPLETED`, or the kind of failure: "HTTP 429", "timeout", "connection", "stream".
        detail: reason of the failure, in the server's words.
        pieces_s: times at which text arrived.
        ended_s: time at which the answer was complete, or had failed.
        num_prompt, num_cached, num_new: numbers of tokens in the server's usage; None if it states none.
    """

    due_s: float
    sent_s: float
    kind: str = COMPLETED
    detail: str = ""
    pieces_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    num_prompt: int | None = None
    num_cached: int | None = None
    num_new: int | None = None


class Client:
    """Sends requests to one model of one server.

    Args:
        endpoint: address of the server.
        model: name of the model; None for the server's only one.
        api_key: API key to send, if any.
        timeout_s: time limit of a complete answer, in seconds.
        ignore_eos: True to request outputs that continue past the end-of-sequence token.

    Attributes:
        takes_ids: True to send prompts of synthetic requests as token ids; False to send one word for each token id.
    """

    def __init__(
        self, endpoint: Endpoint, *, model: str | None, api_key: str | None, timeout_s: float, ignore_eos: bool
    ) -> None:
        self.endpoint = endpoint
        self.model = model
        self.takes_ids = True
        self.ignores_eos = ignore_eos
        self._timeout_s = timeout_s
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def check(self) -> None:
        """Check that the server answers and has the model.

        Raises:
            ServerUnreachable: it does not answer, refuses the key, or does not have the model.
        """
        status, body = await self._fetch("GET", "/v1/models", b"")
        if status in (401, 403):
            raise ServerUnreachable(f"{self.endpoint.url} refuses the API key, or wants one: {_message(body)}")
        names = _model_names(body) if status == 200 else []
        if self.model is None and len(names) == 1:
            self.model = names[0]
        elif self.model is None:
            raise ServerUnreachable(f"{self.endpoint.url} has {_listed(names)}: say which with --model")
        elif names and self.model not in names:
            raise ServerUnreachable(f"{self.endpoint.url} has no model {self.model!r}; it has {_listed(names)}")

    async def choose_form(self, ids: list[int]) -> None:
        """Choose the form of synthetic requests by trial: token ids or words, with `ignore_eos` or without.

        Args:
            ids: token ids of a prompt to try.

        Raises:
            ServerUnreachable: the server accepts no form.
        """
        refusal = ""
        for takes_ids, ignores_eos in ((True, True), (True, False), (False, True), (False, False)):
            if ignores_eos and not self.ignores_eos:
                continue
            request = self.synthetic(BenchRequest(ids, 1), takes_ids=takes_ids)
            body = {**self._body(request), **({"ignore_eos": True} if ignores_eos else {}), "stream": False}
            del body["stream_options"]
            status, answer = await self._fetch("POST", "/v1/completions", json.dumps(body).encode())
            if status == 200:
                self.takes_ids, self.ignores_eos = takes_ids, ignores_eos
                return
            refusal = f"HTTP {status}: {_message(answer)}"
        raise ServerUnreachable(f"{self.endpoint.url} refuses a completion of {len(ids)} tokens with {refusal}")

    def synthetic(self, request: BenchRequest, *, takes_ids: bool | None = None) -> TracedRequest:
        """Return a synthetic request in the form that the server accepts."""
        if self.takes_ids if takes_ids is None else takes_ids:
            return TracedRequest(request.prompt, request.num_new)
        return TracedRequest(" ".join(WORDS[token_id % len(WORDS)] for token_id in request.prompt), request.num_new)

    async def send(self, request: TracedRequest, due_s: float) -> Outcome:
        """Send one request and read its answer; a failure is part of the outcome."""
        outcome = Outcome(due_s, time.perf_counter())
        body = self._body(request)
        if self.ignores_eos:
            body["ignore_eos"] = True
        route = "/v1/chat/completions" if request.is_chat else "/v1/completions"
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                exchange(self.endpoint, "POST", route, self._headers, json.dumps(body).encode()) as response,
            ):
                if response.status == 200:
                    await _read_stream(response.pieces, outcome)
                else:
                    outcome.kind, outcome.detail = f"HTTP {response.status}", _message(await response.read())
        except TimeoutError:
            outcome.kind, outcome.detail = "timeout", f"no whole answer after {self._timeout_s:g} s"
        except FAILURES as error:
            outcome.kind, outcome.detail = "connection", reason(error)
        outcome.ended_s = time.perf_counter()
        return outcome

    def _body(self, request: TracedRequest) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages" if request.is_chat else "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    async def _fetch(self, method: str, route: str, body: bytes) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        try:
            async with (
                asyncio.timeout(CHECK_TIMEOUT_S),
                exchange(self.endpoint, method, route, self._headers, body) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as error:
            why = f"nothing came within {CHECK_TIMEOUT_S:g} s"
            raise ServerUnreachable(f"no server answers at {self.endpoint.url}: {why}") from error
        except FAILURES as error:
            raise ServerUnreachable(f"no server answers at {self.endpoint.url}: {reason(error)}") from error


async def _read_stream(pieces: AsyncIterator[bytes], outcome: Outcome) -> None:
    """Read a stream of events into the outcome."""
    is_whole = False
    async for data in events(pieces):
        now = time.perf_counter()
        if data == "[DONE]":
            is_whole = True
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            outcome.kind, outcome.detail = "stream", f"an event is not JSON: {data[:80]!r}"
            return
        if not isinstance(chunk, dict) or chunk.get("error"):
            outcome.kind, outcome.detail = "stream", _message(data.encode())
            return
        choices = chunk.get("choices") or ()
        if any(_text_of(choice) for choice in choices):
            outcome.pieces_s.append(now)
        is_whole = is_whole or any(choice.get("finish_reason") for choice in choices)
        _record_usage(chunk.get("usage"), outcome)
    if not is_whole:
        outcome.kind, outcome.detail = "stream", "it ended before the answer did"


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the data of each server-sent event; skip comments and other fields."""
    partial_line, data = b"", []
    async for piece in pieces:
        *lines, partial_line = (partial_line + piece).split(b"\n")
        for line in lines:
            text = line.rstrip(b"\r")
            if text.startswith(b"data:"):
                data.append(text[5:].removeprefix(b" ").decode("utf-8", "replace"))
            elif not text and data:
                yield "\n".join(data)
                data = []


def _text_of(choice: Mapping[str, Any]) -> object:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content")


def _record_usage(usage: object, outcome: Outcome) -> None:
    if isinstance(usage, dict):
        details = usage.get("prompt_tokens_details") or {}
        outcome.num_prompt = usage.get("prompt_tokens")
        outcome.num_new = usage.get("completion_tokens")
        outcome.num_cached = details.get("cached_tokens")


def _message(body: bytes) -> str:
    """Return the message in the body of an error, as one short line."""
    try:
        parsed = json.loads(body)
        error = parsed.get("error", parsed)
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:200]


def _model_names(body: bytes) -> list[str]:
    try:
        return [str(card["id"]) for card in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError):
        return []


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "no list of models"
