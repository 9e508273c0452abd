"""All routers of simulated fleets, by name, and the router of `quire route` for simulated replicas.

The router has its real core, with the KV events of the replicas' real memory managers. The events of a step come with
its results, as in an engine, so a leap of a replica stays within blocks. Requests name no session, since the events
come before a session's next turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.fleet.routing.router import Route, Router, RouteRequest
from quire.measurement.simulation.request import SimulatedRequest
from quire.measurement.simulation.routing import LeastLoaded, PrefixAware, RoundRobin, RouterView, SimulatedRouter
from quire.memory.kv_events import KVEventCollector
from quire.memory.manager import KVCacheManager


class KVEventRouter(SimulatedRouter):
    """Routes requests by `quire.fleet.routing.router.Router`, with its default constants."""

    follows_events = True

    def __init__(self) -> None:
        self.router = Router()
        self._collectors: dict[int, KVEventCollector] = {}
        # Routes of requests by the stream of their outputs, which identifies a request.
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
        """Collect the events of a new replica."""
        self._collectors[idx] = KVEventCollector(memory)

    def on_step_results(self, idx: int, now_s: float) -> None:  # noqa: ARG002
        """Apply the events of a replica's step."""
        collector, name = self._collectors[idx], str(idx)
        if collector.has_events:
            self.router.apply(name, self.router.feeds[name].next_seq, collector.take_events())

    def on_first_token(self, request: SimulatedRequest, idx: int, now_s: float) -> None:  # noqa: ARG002
        """Tell the router that an answer has begun."""
        self.router.on_first_token(self._routes[request.output_stream], now_s)

    def on_end(self, request: SimulatedRequest, idx: int, now_s: float) -> None:  # noqa: ARG002
        """Tell the router that a request has ended."""
        self.router.end(self._routes.pop(request.output_stream))


# Name -> constructor of an empty router.
ROUTERS: Mapping[str, Callable[[], SimulatedRouter]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
    "kv_events": KVEventRouter,
}
