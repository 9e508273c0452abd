"""The state that the routes of one server share."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.sequences.params import SamplingParams
from quire.server.block_map import BlockMapHub
from quire.server.body import BodyReader
from quire.server.logprob_budget import LogprobBudget, LogprobReservation
from quire.server.prefix_tree import PrefixTreeView
from quire.server.settings import ServerConfig
from quire.server.stream_merge import StreamMerger
from quire.server.usage import TokenCount
from quire.text.reasoning import ReasoningModel
from quire.text.tool_calls import ToolFormat

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.outputs.outputs import RequestMetrics


# Requests that ended so long ago are not among the latest times to the first token.
FIRST_TOKEN_WINDOW_S = 60.0


@dataclass(slots=True)
class InFlightRequest:
    """One HTTP request that is being tokenized, or is in the engine.

    Args:
        answer_id: `id` of its answer.
        count: number of its tokens so far.
        merger: merged stream of its outputs.
        tenant: tenant of the client, None where all clients are one tenant.
        started_s: time of arrival, in seconds of the monotonic clock.
        logprobs: reservation of the log probabilities in its answer.
        params: its sampling parameters.
        times: times of its first prompt; None until there is an output.
        shown_prompt: beginning of its prompts, None where prompts are not logged.
    """

    answer_id: str
    count: TokenCount
    merger: StreamMerger
    tenant: str | None = None
    started_s: float = field(default_factory=time.monotonic)
    logprobs: LogprobReservation | None = None
    params: SamplingParams | None = None
    times: RequestMetrics | None = None
    shown_prompt: str | None = None

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to its first output; None before it."""
        return (self.count.first_ns - self.count.begin_ns) / 1e9 if self.count.num_prompt else None

    def release(self) -> None:
        """Give the reservation back when sending has ended, complete or not."""
        if self.logprobs is not None:
            self.logprobs.release()


@dataclass(slots=True)
class ServerState:
    """The state that the routes of one server share.

    Args:
        llm: the engine.
        config: the server's options.
        bodies: parser of request bodies.
        version: version of Quire.
        created: time of the server's start, in Unix seconds.
        tool_format: format of the model's tool calls, None where it is not known.
        reasoning: the model's thinking, None where it is not known.
        aliases: further names of the model.
        is_draining: True once the server is stopping.
        in_flight: requests in the engine, by the id of their answer.
        logprobs: budget of log probabilities in answers.
        block_map: live map of the KV cache.
        prefix_tree: the prefix tree as the page draws it.
        recent_first_tokens: time of the end, tenant and seconds to the first token of the latest requests.
        writing: lock that is held while a piece of a long answer is made; see `json_stream.paced`.
    """

    llm: AsyncLLM
    config: ServerConfig
    bodies: BodyReader
    version: str
    created: int
    tool_format: ToolFormat | None = None
    reasoning: ReasoningModel | None = None
    aliases: tuple[str, ...] = ()
    is_draining: bool = False
    in_flight: dict[str, InFlightRequest] = field(default_factory=dict)
    logprobs: LogprobBudget = field(init=False)
    block_map: BlockMapHub = field(init=False)
    prefix_tree: PrefixTreeView = field(init=False)
    recent_first_tokens: deque[tuple[float, str | None, float]] = field(default_factory=lambda: deque(maxlen=1024))
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.logprobs = LogprobBudget(self.config.max_request_logprobs)
        self.block_map = BlockMapHub(self.llm, lambda: self.is_draining, self.first_token_times)
        self.prefix_tree = PrefixTreeView(self.llm)

    @contextmanager
    def track(self, tracked: InFlightRequest) -> Iterator[None]:
        """List a request as in flight inside the context."""
        self.in_flight[tracked.answer_id] = tracked
        try:
            yield
        finally:
            del self.in_flight[tracked.answer_id]
            if tracked.first_token_s is not None:
                self.recent_first_tokens.append((time.monotonic(), tracked.tenant, tracked.first_token_s))

    def first_token_times(self, tenant: str | None) -> list[float]:
        """Return the times to the first token of requests in flight, and of those that ended in the last minute.

        Args:
            tenant: tenant of the requests; None for those of all.
        """
        since_s = time.monotonic() - FIRST_TOKEN_WINDOW_S
        ended = [(each, first_s) for at_s, each, first_s in self.recent_first_tokens if at_s >= since_s]
        begun = [(each.tenant, each.first_token_s) for each in self.in_flight.values()]
        return [first_s for each, first_s in (*ended, *begun) if first_s is not None and tenant in (None, each)]
