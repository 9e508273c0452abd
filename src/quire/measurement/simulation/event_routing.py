"""The router of `quire route` before simulated replicas: its real core, fed by the KV events of their real memories.

The events of a step come with its results, as an engine publishes them; so a replica that is followed leaps within
blocks only. Requests name no session: the events come before a session's next turn.
"""

from __future__ import annotations

from quire.fleet.routing.router import Route, Router, RouteRequest
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.routing import RouterView, SimulatedRouter
from quire.memory.kv_events import KVEventCollector
from quire.memory.manager import KVCacheManager


class KVEventRouter(SimulatedRouter):
    """Routes by `quire.fleet.routing.router.Router`, with its default constants."""

    follows_events = True

    def __init__(self) -> None:
        self.router = Router()
        self._collectors: dict[int, KVEventCollector] = {}
        # By the stream of the request's output, which no other request has.
        self._routes: dict[int, Route] = {}

    def choose(self, request: SimulatedRequest, view: RouterView, now_s: float) -> int:
        """Return the replica with the best score."""
        for idx in range(len(self.router.replicas), len(view.loads.counts)):
            self.router.add_replica(str(idx))
        route = self.router.route(RouteRequest(view.token_ids()), now_s)
        assert route is not None, "all replicas take requests"
        self._routes[request.output_stream] = route
        return int(route.replica)

    def on_replica(self, idx: int, memory: KVCacheManager) -> None:
        """Follow the events of a replica."""
        self._collectors[idx] = KVEventCollector(memory)

    def on_step_results(self, idx: int, now_s: float) -> None:  # noqa: ARG002
        """Apply the events of a replica's step."""
        collector, name = self._collectors[idx], str(idx)
        if collector.has_events:
            self.router.apply(name, self.router.feeds[name].next_seq, collector.take_events())

    def on_first_token(self, request: SimulatedRequest, idx: int, now_s: float) -> None:  # noqa: ARG002
        """Record that an answer has begun."""
        self.router.on_first_token(self._routes[request.output_stream], now_s)

    def on_end(self, request: SimulatedRequest, idx: int, now_s: float) -> None:  # noqa: ARG002
        """Record that a request has ended."""
        self.router.end(self._routes.pop(request.output_stream))
