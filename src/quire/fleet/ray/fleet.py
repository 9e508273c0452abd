"""The replicas of a deployment for a handle's router: the core of the router with Serve's names and numbers.

```
 Serve's router    candidates, replicas that die, queue lengths ---.
 ingress           tickets: tokens, sessions, first bytes, ends ----> ReplicaFleet -> quire.fleet.routing.Router
 replicas          KV events (ZMQ) --------------------------------'
```

All methods run on the event loop of Serve's router, except `soon`, `names` and `describe_soon`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from quire.errors import ConfigError
from quire.fleet.kv_events.subscriber import KVEventSubscriber
from quire.fleet.ray.call import Ticket
from quire.fleet.routing.router import Router, RouterConfig, RouteRequest

logger = logging.getLogger(__name__)

# Time for which a queue length with requests of other routers counts.
QUEUE_LEN_S: Final = 2.0
LOOPBACK: Final = ("//127.", "//localhost:", "//[::1]:")
EVERYWHERE: Final = ("//*:", "//0.0.0.0:", "//[::]:")

# The fleets of this process by name of the application, for the ingress to find its handle's fleet.
FLEETS: Final[dict[str, ReplicaFleet]] = {}


class ReplicaFleet:
    """The replicas that one handle may choose from."""

    def __init__(self, config: RouterConfig | None = None, node_ip: str = "") -> None:
        self.router = Router(config)
        self.replicas: dict[str, Mapping[str, Any]] = {}
        self._node_ip = node_ip
        self._loop: asyncio.AbstractEventLoop | None = None
        self._following: dict[str, asyncio.Task[None]] = {}
        self._num_own: dict[str, int] = {}
        # Time at which a replica's queue length included requests of other routers.
        self._others_s: dict[str, float] = {}

    # ---- any thread ----

    @property
    def names(self) -> list[str]:
        """Names of the present replicas."""
        return list(self.replicas)

    def soon(self, function: Callable[..., None], *args: Any) -> None:
        """Have a function run on the event loop of the router."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the process is ending
                self._loop.call_soon_threadsafe(function, *args)

    async def describe_soon(self) -> dict[str, dict[str, Any]]:
        """Return the state of each replica; may be awaited on another event loop."""
        if self._loop is None:
            return {}
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._describe(), self._loop))

    # ---- replicas ----

    def update(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Update the set of replicas."""
        self._loop = asyncio.get_running_loop()
        for name in self.replicas.keys() - replicas.keys():
            self.drop(name)
        for name, described in replicas.items():
            if name not in self.replicas:
                self.replicas[name] = described
                self._num_own[name] = 0
                self.router.add_replica(name)
                self._follow(name, described)

    def drop(self, name: str) -> None:
        """Forget a replica that has ended."""
        if name not in self.replicas:
            return
        del self.replicas[name], self._num_own[name]
        self._others_s.pop(name, None)
        self.router.remove_replica(name)
        following = self._following.pop(name, None)
        if following is not None:
            following.cancel()

    # ---- requests ----

    def rank(self, ticket: Ticket, now_s: float | None = None) -> list[str]:
        """Return the replicas for a request, the best first, and count it as work of the best one.

        Replicas that it has tried before come last, so that there is always a replica for it.
        """
        now_s = time.monotonic() if now_s is None else now_s
        self._end_begun(ticket)
        ticket.fleet = self
        for name in [name for name, at_s in self._others_s.items() if now_s - at_s > QUEUE_LEN_S]:
            del self._others_s[name]
            self.router.set_others(name, 0)
        if ticket.is_pinned:
            names = sorted(self.replicas)
        else:
            request = ticket.request or RouteRequest(())
            routes = self.router.rank(request, now_s, ticket.tried) or self.router.rank(request, now_s)
            ticket.routes = {route.replica: route for route in routes}
            names = list(ticket.routes)
            names += sorted(self.replicas.keys() - ticket.routes.keys(), key=self.router.queue_s)
        if names:
            self._begin(ticket, names[0], now_s)
        first = [name for name in names if name not in ticket.tried]
        if ticket.is_ended:  # it ended before `fleet` was set
            self._end_begun(ticket)
        return first + [name for name in names if name in ticket.tried]

    def on_routed(self, ticket: Ticket, name: str, now_s: float | None = None) -> None:
        """Record that a replica has taken a request; it may be another than the best one."""
        now_s = time.monotonic() if now_s is None else now_s
        if ticket.counted is not None and ticket.counted != name:
            self._end_begun(ticket)
            self._begin(ticket, name, now_s)
        ticket.num_hit = 0 if ticket.begun is None else ticket.begun.hit.num_tokens
        ticket.replica, ticket.routed_s = name, now_s

    def on_first_token(self, ticket: Ticket, now_s: float | None = None) -> None:
        """Record that a stream has begun."""
        if ticket.begun is not None:
            self.router.on_first_token(ticket.begun, time.monotonic() if now_s is None else now_s)

    def end(self, ticket: Ticket) -> None:
        """Record that an attempt has ended, complete or not."""
        self._end_begun(ticket)

    def on_queue_len(self, name: str, num_ongoing: int, now_s: float | None = None) -> None:
        """Take a replica's number of requests; requests that this router has not sent are from other routers.

        Each of them counts like an average request of this router.
        """
        if name not in self.replicas:
            return
        num_others = max(0, num_ongoing - self._num_own[name])
        if not num_others and name not in self._others_s:
            return
        tokens = sum(self.router.own_tokens(replica) for replica in self.replicas)
        mean = max(self.router.config.stream_tokens, tokens // max(1, sum(self._num_own.values())))
        self.router.set_others(name, num_others * mean)
        self._others_s[name] = time.monotonic() if now_s is None else now_s

    # ---- parts ----

    def _begin(self, ticket: Ticket, name: str, now_s: float) -> None:
        """Count a request at a replica; a request with a prompt also counts as its work."""
        if name not in self.replicas:
            return
        ticket.counted = name
        self._num_own[name] += 1
        route = ticket.routes.get(name)
        if ticket.request is not None and route is not None:
            self.router.begin(route, ticket.request, now_s)
            ticket.begun = route

    def _end_begun(self, ticket: Ticket) -> None:
        if ticket.begun is not None:
            self.router.end(ticket.begun)
        if ticket.counted in self._num_own:
            self._num_own[ticket.counted] -= 1
        ticket.begun = ticket.counted = None

    def _follow(self, name: str, described: Mapping[str, Any]) -> None:
        """Follow a replica's KV events; without them, routing depends on its queue and its sessions."""
        source, node_ip = described.get("kv_events"), str(described.get("node_ip") or "")
        if not isinstance(source, Mapping):
            return
        endpoints = [_reachable(source.get(key), node_ip, self._node_ip) for key in ("endpoint", "replay_endpoint")]
        if endpoints[0] is None:
            logger.warning(
                "requests to %s are routed without its KV events: it publishes at %s, which is its own node's alone",
                name,
                source.get("endpoint"),
            )
            return
        router = self.router
        try:
            subscriber = KVEventSubscriber(
                endpoints[0],
                endpoints[1],
                lambda seq, events, is_replay: router.apply(name, seq, events, is_replay=is_replay),
                lambda: router.feeds[name].next_seq,
                str(source.get("topic") or ""),
            )
        except ConfigError as error:
            logger.warning("requests to %s are routed without its KV events: %s", name, error)
            return
        self._following[name] = asyncio.get_running_loop().create_task(subscriber.run())

    async def _describe(self) -> dict[str, dict[str, Any]]:
        descriptions: dict[str, dict[str, Any]] = {}
        for name, described in self.replicas.items():
            feed, load = self.router.feeds[name], self.router.load_of(name)
            descriptions[name] = {
                "replica": name,
                "is_available": True,
                "num_in_flight": self._num_own[name],
                "num_requests": load.num_requests,
                "queue_s": round(self.router.queue_s(name), 6),
                "computed_tokens": load.computed_tokens,
                "num_blocks": self.router.num_blocks(name),
                "events": feed.state.name.lower(),
                "num_gaps": feed.num_gaps,
                "next_seq": feed.next_seq,
                "kv_events": described.get("kv_events"),
                "node_ip": described.get("node_ip"),
                "pid": described.get("pid"),
            }
        return descriptions


def open_fleet(app_name: str, config: RouterConfig, node_ip: str) -> ReplicaFleet:
    """Return a new fleet, after adding it to `FLEETS`.

    It is a function of this module because Serve pickles the calling module by value, with copies of its globals.
    """
    fleet = FLEETS[app_name] = ReplicaFleet(config, node_ip)
    return fleet


def _reachable(endpoint: Any, publisher_ip: str, node_ip: str) -> str | None:
    """Return an endpoint with an address that this node can reach; None if it cannot."""
    if not isinstance(endpoint, str):
        return None
    reachable: str = endpoint
    if any(part in reachable for part in LOOPBACK):
        return reachable if publisher_ip == node_ip else None
    for part in EVERYWHERE:
        reachable = reachable.replace(part, f"//{publisher_ip}:")
    return reachable
