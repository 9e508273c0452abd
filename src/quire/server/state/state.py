"""The state that the routes of one server share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.server.admission.in_flight import RequestsInFlight
from quire.server.admission.logprob_budget import LogprobBudget
from quire.server.kv_views.views import ServerViews
from quire.server.requests.body import BodyReader
from quire.server.settings import ServerConfig
from quire.text.reasoning import ReasoningModel
from quire.text.tool_calls import ToolFormat

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM


@dataclass(slots=True)
class ServerState:
    """The state that the routes of one server share.

    Args:
        llm: the engine.
        config: the server's options.
        bodies: parser of request bodies.
        version: version of Quire.
        created: time of the server's start, in Unix seconds.
        tool_format: format of the model's tool calls; None if it is unknown.
        reasoning: format of the model's thinking; None if it is unknown.
        aliases: further names of the model.
        is_draining: True once the server is stopping.
        in_flight: requests that are being tokenized or are in the engine.
        views: views of the engine for operators and the page.
        logprobs: budget of log probabilities in answers.
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
    in_flight: RequestsInFlight = field(init=False, default_factory=RequestsInFlight)
    views: ServerViews = field(init=False)
    logprobs: LogprobBudget = field(init=False)
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.views = ServerViews(self.llm, self.in_flight)
        self.logprobs = LogprobBudget(self.config.max_request_logprobs)

    def close(self) -> None:
        """End all watchers and the parser of bodies."""
        self.views.close()
        self.bodies.close()
