"""A server of the proxy: whether it takes requests, by its health and its failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from quire.errors import ConfigError
from quire.fleet.kv_events.subscriber import KVEventSubscriber
from quire.fleet.proxy.shared_state import SharedState
from quire.fleet.proxy.upstream import MAX_FETCHED, Upstream, UpstreamLost
from quire.fleet.routing.breaker import Breaker
from quire.fleet.routing.router import Router
from quire.platform.bounded.json_text import BadJSON, parse

logger = logging.getLogger(__name__)

PROBE_S = 5.0
# Time for a server that comes up to make a change that it has missed, and bytes of a list of models.
CHANGE_S = 120.0
MAX_LIST_BYTES = 4 << 20
# Bounds of the time without requests after a 429 or 503.
LEAST_BUSY_S, MOST_BUSY_S = 0.25, 2.0
# Least time between two probes.
MIN_PROBE_S = 0.05
# Failed probes after which a server is down, and its requests are lost.
MAX_MISSED = 3


class Replica:
    """One server.

    Args:
        name: address of the server.
        router: router of the requests.
        breaker: breaker that an ejection opens.
        shared: state that the server is told when it comes up.
        headers: headers of the proxy's own requests.

    Attributes:
        models: names of its models and adapters; None if it does not list them.
    """

    def __init__(
        self, name: str, router: Router, breaker: Breaker, shared: SharedState, headers: list[tuple[bytes, bytes]]
    ) -> None:
        self.name = name
        self.upstream = Upstream(name)
        self.is_up = self.is_draining = False
        self.num_in_flight = 0
        self.why_down = "it was not asked yet"
        self.breaker = breaker
        self.models: frozenset[str] | None = None
        self._shared = shared
        # Numbers of the last change that it was told: since it has come up, and at all.
        self._told_seq = self._ever_told_seq = 0
        self._busy_until_s = 0.0
        self._router = router
        self._headers = headers
        self._num_missed = 0
        # Set once the first probe has ended.
        self.probed = asyncio.Event()
        self._is_wanted = asyncio.Event()
        self._source: dict[str, Any] | None = None
        self._seq_before = -1
        self._following: asyncio.Task[None] | None = None
        self.subscriber: KVEventSubscriber | None = None
        router.add_replica(name)
        router.set_available(name, False)

    @property
    def is_usable(self) -> bool:
        """Whether it is up and not draining, ejected or not."""
        return self.is_up and not self.is_draining

    @property
    def is_ejected(self) -> bool:
        """Whether its breaker allows no request now."""
        return not self.breaker.allows(asyncio.get_running_loop().time())

    @property
    def is_busy(self) -> bool:
        """Whether it has said lately that it can take no request."""
        return asyncio.get_running_loop().time() < self._busy_until_s

    @property
    def is_available(self) -> bool:
        """Whether it takes requests now."""
        return self.is_usable and not self.is_ejected and not self.is_busy

    async def watch(self, interval_s: float) -> None:
        """Probe the server until cancelled."""
        try:
            while True:
                await self.probe()
                self.probed.set()
                await asyncio.sleep(min(MIN_PROBE_S, interval_s))
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s - MIN_PROBE_S):
                        await self._is_wanted.wait()
                self._is_wanted.clear()
        finally:
            self._unfollow()
            self.upstream.abort()

    async def probe(self) -> None:
        """Request the server's health and the endpoints of its KV events."""
        try:
            status, body = await self.fetch("GET", "/health")
        except UpstreamLost as error:
            self._miss(error)
            return
        if status != 200:
            # A stopping server still completes its requests; a dead or stuck one does not.
            self._set_down(_shown(body), is_lost=b'"stopping"' not in body)
            return
        self._num_missed = 0
        await self.read_models()
        if not self.is_up and not await self._come_up():
            return
        self.update()
        await self._follow()

    async def fetch(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        timeout_s: float = PROBE_S,
        max_bytes: int = MAX_FETCHED,
    ) -> tuple[int, bytes]:
        """Send a request of the proxy itself, and return status and body of the answer."""
        own = [*self._headers, (b"content-type", b"application/json")] if body and not headers else self._headers
        headers = [*own, *headers]
        return await self.upstream.fetch(method, path, headers, body, timeout_s=timeout_s, max_bytes=max_bytes)

    def probe_soon(self) -> None:
        """Have the next probe made at once, because a request has shown that the server's state may have changed."""
        self._is_wanted.set()

    def lose(self, error: UpstreamLost) -> None:
        """Take the loss of a connection: if nothing listens at the server's address, it is down."""
        if error.is_refused:
            self._set_down(str(error), is_lost=True, is_refused=True)
        else:
            self.probe_soon()

    def refuse_for(self, retry_after: bytes) -> None:
        """Take a 429 or 503: other servers get the requests for the time that it states, within bounds."""
        stated_s = float(retry_after) if retry_after.isdigit() else LEAST_BUSY_S
        busy_s = min(max(stated_s, LEAST_BUSY_S), MOST_BUSY_S)
        self._busy_until_s = asyncio.get_running_loop().time() + busy_s
        self.probe_soon()

    def told(self, seq: int) -> None:
        """Record that the server was told the changes of shared state up to a number."""
        self._told_seq = self._ever_told_seq = seq

    def miss_change(self) -> None:
        """Send no more requests until a probe has told the server the change that it has missed."""
        self._set_down("it has missed a change of the state of all servers", is_lost=False)
        self.probe_soon()

    async def read_models(self) -> None:
        """Request the list of the server's models; if it cannot be read, the last one stays."""
        try:
            status, body = await self.fetch("GET", "/v1/models", max_bytes=MAX_LIST_BYTES)
            fields = parse(body) if status == 200 else {}
        except (UpstreamLost, BadJSON):
            return
        data = fields.get("data") if isinstance(fields, dict) else None
        if isinstance(data, list):
            names = (card.get("id") for card in data if isinstance(card, dict))
            self.models = frozenset(name for name in names if isinstance(name, str))

    def update(self) -> None:
        """Tell the router whether the server takes requests."""
        self._router.set_available(self.name, self.is_available)

    def describe(self) -> dict[str, Any]:
        """Return the state of the server, for operators."""
        feed, load = self._router.feeds[self.name], self._router.load_of(self.name)
        return {
            "url": self.name,
            "is_available": self.is_available,
            "is_up": self.is_up,
            "is_draining": self.is_draining,
            "is_busy": self.is_busy,
            "breaker": self.breaker.state(asyncio.get_running_loop().time()).value,
            "num_ejections": self.breaker.num_opened,
            "num_failures": self.breaker.num_failures,
            "num_in_flight": self.num_in_flight,
            "why_down": self.why_down,
            "models": None if self.models is None else sorted(self.models),
            "num_requests": load.num_requests,
            "queue_s": round(self._router.queue_s(self.name), 6),
            "computed_tokens": load.computed_tokens,
            "num_blocks": self._router.num_blocks(self.name),
            "events": feed.state.name.lower(),
            "num_gaps": feed.num_gaps,
        }

    # ---- parts ----

    def _miss(self, error: UpstreamLost) -> None:
        self._num_missed += 1
        self.why_down = str(error)
        if self._num_missed >= MAX_MISSED or not self.is_up or not error.was_sent:
            self._set_down(str(error), is_lost=True, is_refused=error.is_refused)

    def _set_down(self, why: str, *, is_lost: bool, is_refused: bool = False) -> None:
        """Send no more requests; if the server is lost, so are its requests and its cache.

        A server that refuses connections may be stopping, and still answer what it has. If it has ended, so have its
        connections.
        """
        if self.is_up:
            logger.warning("%s is down: %s", self.name, why)
        self.is_up, self.why_down = False, why
        if is_lost:
            self._unfollow()
            self._router.restart_replica(self.name)
            if not is_refused:
                self.upstream.abort()
        self.update()

    async def _come_up(self) -> bool:
        """Tell the server the changes of shared state that it has missed; return False if it is lost meanwhile."""
        shared, self._told_seq = self._shared, 0
        while True:
            for change in shared.missed(self._told_seq, self._ever_told_seq):
                try:
                    status, body = await self.fetch(
                        "POST", change.path, change.body, headers=change.headers, timeout_s=CHANGE_S
                    )
                except UpstreamLost as error:
                    self._miss(error)
                    return False
                if status >= 400:
                    # An adapter that it has, a pin that it lacks: a server that was not restarted has its state.
                    logger.info("%s has refused %s again: %s", self.name, change.path, _shown(body))
            seq = shared.seq
            async with shared.lock:  # no change is on its way
                self.told(seq)
                if seq == shared.seq:
                    break
        await self.read_models()
        logger.info("%s is up", self.name)
        self.is_up, self.why_down = True, ""
        return True

    async def _follow(self) -> None:
        """Follow the server's KV events at the endpoints that it states; detect lost batches and restarts."""
        try:
            status, body = await self.fetch("GET", "/kv_event_sources")
            sources = parse(body) if status == 200 else {}
            source = sources.get("0") if isinstance(sources, dict) else None
        except (UpstreamLost, BadJSON):
            return
        if not isinstance(source, dict) or not isinstance(source.get("endpoint"), str):
            return
        key = {name: source.get(name) for name in ("endpoint", "replay_endpoint", "topic")}
        if self._following is None or self._following.done() or key != self._source:
            self._unfollow()
            self._source = key
            self._start_following(key)
        feed, published = self._router.feeds[self.name], source.get("next_seq")
        if isinstance(published, int):
            # Batches from before the last probe that have not arrived by now are lost, or much too late.
            if feed.next_seq < self._seq_before:
                feed.lose()
            elif feed.next_seq > published:
                self._router.restart_replica(self.name)
            self._seq_before = published

    def _start_following(self, source: dict[str, Any]) -> None:
        router, name = self._router, self.name
        try:
            self.subscriber = KVEventSubscriber(
                self._reachable(source["endpoint"]),
                self._reachable(source["replay_endpoint"]) if isinstance(source["replay_endpoint"], str) else None,
                lambda seq, events, is_replay: router.apply(name, seq, events, is_replay=is_replay),
                lambda: router.feeds[name].next_seq,
                source["topic"] if isinstance(source["topic"], str) else "",
            )
        except ConfigError as error:
            logger.warning("%s: requests are routed without KV events: %s", self.name, error)
            self._following = asyncio.create_task(asyncio.sleep(3600))
            return
        self._following = asyncio.create_task(self.subscriber.run())

    def _reachable(self, endpoint: str) -> str:
        """Return an endpoint, with the server's host if it listens at all addresses."""
        for everywhere in ("//*:", "//0.0.0.0:", "//[::]:"):
            endpoint = endpoint.replace(everywhere, f"//{self.upstream.host}:")
        return endpoint

    def _unfollow(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None
        self._source, self._seq_before = None, -1


def _shown(body: bytes) -> str:
    return body[:200].decode("utf-8", "replace")
