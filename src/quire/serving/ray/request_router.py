"""Ray Serve's request router that asks Quire's: each replica's KV events are followed where requests are routed."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.errors import ConfigError
from quire.kvevents.subscriber import KVEventSubscriber
from quire.routing.router import Route, Router, RouterConfig, RouteRequest
from quire.routing.shadow_tree import Scope

logger = logging.getLogger(__name__)


class CacheAwareRouter(RequestRouter):
    """Ranks replicas by what their caches save and what their queues cost.

    Requests carry what it looks at in the argument `route` of `EngineServer.handle`: a mapping with `token_ids`,
    `scope` and `session`. Others go to the shortest queue.
    """

    def initialize_state(self, **constants: Any) -> None:
        """Take the constants of the score; see `RouterConfig`."""
        self._core = Router(RouterConfig(**constants))
        self._following: dict[str, asyncio.Task[None]] = {}
        # Routes that were ranked, by request and replica; and those that were taken.
        self._ranked: dict[str, tuple[RouteRequest, dict[str, Route]]] = {}
        self._routes: dict[str, Route] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Follow new replicas, and forget those that are gone."""
        super().update_replicas(replicas)
        present = {replica.replica_id.unique_id: replica for replica in replicas}
        for name in [name for name in self._core.replicas if name not in present]:
            self._core.remove_replica(name)
            task = self._following.pop(name, None)
            if task is not None:
                task.cancel()
        for name, replica in present.items():
            if name not in self._core.replicas:
                self._core.add_replica(name)
            if name not in self._following:
                self._follow(name, replica)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which they are to be tried, each as a rank of its own."""
        request = _read(pending_request)
        routes = self._core.rank(request, time.monotonic())
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            self._ranked[pending_request.metadata.internal_request_id] = (
                request,
                {route.replica: route for route in routes},
            )
        ranks = [[by_name.pop(route.replica)] for route in routes if route.replica in by_name]
        return [*ranks, list(by_name.values())] if by_name else ranks

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Count a request as work of the replica that took it."""
        super().on_request_routed(pending_request, replica_id, result)
        name = pending_request.metadata.internal_request_id
        request, routes = self._ranked.pop(name, (None, {}))
        route = routes.get(replica_id.unique_id)
        if request is None or route is None or route.replica not in self._core.replicas:
            return
        now_s = time.monotonic()
        wait_s = self._core.queue_s(route.replica)
        self._core.begin(route, request, now_s)
        self._routes[name] = route
        # Serve does not tell when an answer begins: it is expected after the queue and the prompt's own tokens.
        own_s = (route.num_tokens - route.hit.num_tokens) * self._core.load_of(route.replica).seconds_per_token
        asyncio.get_running_loop().call_later(wait_s + own_s, self._on_expected_token, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request no more."""
        super().on_request_completed(replica_id, internal_request_id)
        route = self._routes.pop(internal_request_id, None)
        if route is not None:
            self._core.end(route)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget the cache of a replica that died."""
        super().on_replica_actor_died(replica_id)
        if replica_id.unique_id in self._core.replicas:
            self._core.restart_replica(replica_id.unique_id)
            self._core.set_available(replica_id.unique_id, False)

    def _on_expected_token(self, name: str) -> None:
        route = self._routes.get(name)
        if route is not None:
            self._core.on_first_token(route, time.monotonic())

    def _follow(self, name: str, replica: RunningReplica) -> None:
        """Follow the KV events of a replica, from the address in its metadata."""
        source = (getattr(replica, "replica_metadata", None) or {}).get("events")
        if not isinstance(source, dict):
            return
        core = self._core
        try:
            subscriber = KVEventSubscriber(
                source["endpoint"],
                source["replay_endpoint"],
                lambda seq, events, is_replay: core.apply(name, seq, events, is_replay=is_replay),
                lambda: core.feeds[name].next_seq,
                source["topic"],
            )
        except ConfigError as error:
            logger.warning("requests are routed without KV events: %s", error)
            return
        self._following[name] = asyncio.get_running_loop().create_task(subscriber.run())


def _read(pending_request: PendingRequest | None) -> RouteRequest:
    """Return what the router looks at of a request."""
    route = None if pending_request is None else pending_request.kwargs.get("route")
    if not isinstance(route, dict):
        return RouteRequest(())
    return RouteRequest(route["token_ids"], Scope(*route["scope"]), route["session"])
