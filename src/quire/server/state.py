"""What the routes of one server share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.server.body import Bodies
from quire.server.logprob_budget import Held, LogprobBudget
from quire.server.settings import ServerConfig
from quire.server.stream_merge import StreamMerger
from quire.server.usage import TokenCount
from quire.text.tool_calls import ToolFormat

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM


@dataclass(slots=True)
class InFlightRequest:
    """One HTTP request that the engine works on, or will.

    Args:
        answer_id: the `id` of its answer.
        count: its tokens so far.
        feed: what happens to it.
        tenant: whose it is, None where all clients are one tenant.
        started_s: when it came, in seconds of the monotonic clock.
        logprobs: the log probabilities that its answer may hold.
    """

    answer_id: str
    count: TokenCount
    feed: StreamMerger
    tenant: str | None = None
    started_s: float = field(default_factory=time.monotonic)
    logprobs: Held | None = None

    def release(self) -> None:
        """Note that the answer is sent, or never will be."""
        if self.logprobs is not None:
            self.logprobs.release()


@dataclass(slots=True)
class ServerState:
    """What the routes of one server share.

    Args:
        llm: the engine.
        config: the server's options.
        bodies: reads what clients send.
        version: Quire's.
        created: when the server started, in Unix seconds.
        tool_format: how the model writes calls of tools, None where that is not known.
        is_draining: True once the server was asked to stop.
        flights: the requests in the engine, by the id of their answer.
        logprobs: what answers may hold.
        writing: held while a piece of a long answer is made; see `json_stream.paced`.
    """

    llm: AsyncLLM
    config: ServerConfig
    bodies: Bodies
    version: str
    created: int
    tool_format: ToolFormat | None = None
    is_draining: bool = False
    in_flight: dict[str, InFlightRequest] = field(default_factory=dict)
    logprobs: LogprobBudget = field(init=False)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.logprobs = LogprobBudget(self.config.max_request_logprobs)

    @contextmanager
    def track(self, flight: InFlightRequest) -> Iterator[None]:
        """List a flight for as long as it lasts."""
        self.in_flight[flight.answer_id] = flight
        try:
            yield
        finally:
            del self.in_flight[flight.answer_id]
