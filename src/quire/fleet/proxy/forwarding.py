"""Forwarding: which servers a request is sent to, and what happens if one fails.

```
 a prompt           the router's server; if it fails before the first byte, the next one
 all servers' state every server: adapters, pins, resets; the answer is the first error, or else the first answer
 all others         a server that takes requests
```
"""

from __future__ import annotations

import asyncio
from typing import Final

from quire.fleet.proxy.exchange import Answer, Exchange
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.metrics import ProxyMetrics
from quire.fleet.proxy.prompts import RoutedPrompts
from quire.fleet.proxy.replica import Replica
from quire.fleet.proxy.streams import PATHS
from quire.fleet.proxy.upstream import UpstreamLost
from quire.fleet.routing.router import Route
from quire.server.requests.errors import unavailable

# Routes that change the state of every server.
BROADCAST: Final = frozenset(
    {
        *("/reset_prefix_cache", "/pin_prefix", "/unpin_prefix"),
        *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    }
)


class Forwarder:
    """Sends requests to servers, by their routes."""

    def __init__(self, fleet: Fleet, prompts: RoutedPrompts, metrics: ProxyMetrics) -> None:
        self._fleet = fleet
        self._prompts = prompts
        self._metrics = metrics

    async def forward(self, exchange: Exchange) -> None:
        """Have servers answer a request."""
        if exchange.path in BROADCAST and exchange.method == "POST":
            await self._broadcast(exchange)
        elif exchange.path in PATHS and exchange.method == "POST":
            await self._route(exchange)
        else:
            await self._pass_on(exchange)

    async def _route(self, exchange: Exchange) -> None:
        """Send a request to the best server in the router's order; if it fails, to the next."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        request = await self._prompts.request_of(exchange)
        tried: list[str] = []
        while True:
            self._fleet.refresh()
            route = self._fleet.router.route(request, loop.time(), tried)
            if route is None:
                await exchange.give_up(bool(tried))
                return
            if not tried:
                self._metrics.choose_s.observe(loop.time() - started_s)
                self._metrics.prompt_tokens.inc(route.num_tokens)
                self._metrics.hit_tokens.inc(route.hit.num_tokens)
            try:
                if await self._attempt(exchange, self._fleet.replicas[route.replica], route):
                    return
            finally:
                self._fleet.router.end(route)
            tried.append(route.replica)
            self._metrics.retries.inc()

    async def _pass_on(self, exchange: Exchange) -> None:
        """Send a request without a cacheable prompt to the server with the fewest requests; if it fails, to the next.

        GET requests go to the first server, because the parts of a page belong together.
        """
        replicas = self._fleet.available()
        if exchange.method == "GET":
            replicas = [replica for replica in self._fleet.replicas.values() if replica in replicas]
        for replica in replicas:
            if await self._attempt(exchange, replica):
                return
        await exchange.give_up(bool(replicas))

    async def _broadcast(self, exchange: Exchange) -> None:
        """Send a request to every server that is up; answer with the first error, or else the first answer."""
        replicas = [replica for replica in self._fleet.replicas.values() if replica.is_up]
        chosen: Answer | None = None
        name = ""  # of the server whose answer is chosen
        try:
            for replica in replicas:
                try:
                    response = await exchange.send_to(replica.upstream)
                except UpstreamLost as error:
                    replica.fail(str(error))
                    why = f"{replica.name} was lost, those before it have done it: {error}"
                    raise unavailable(why, "replica_lost") from error
                if chosen is None or (chosen.status < 400 <= response.status):
                    chosen, response, name = response, chosen, replica.name
                if response is not None:
                    response.close()
            if chosen is None:
                await exchange.give_up(False)
            else:
                await exchange.relay(chosen, name)
        finally:
            if chosen is not None:
                chosen.close()

    async def _attempt(self, exchange: Exchange, replica: Replica, route: Route | None = None) -> bool:
        """Have a server answer a request; return False if another server may still answer it."""

        def on_stream() -> None:
            if route is not None:
                self._fleet.router.on_first_token(route, asyncio.get_running_loop().time())

        replica.num_in_flight += 1
        end = "left"
        try:
            end = await exchange.attempt(
                replica.upstream, lambda: replica.name, on_stream, lambda error: replica.fail(str(error))
            )
            if end == "answered":
                replica.succeed()
        finally:
            replica.num_in_flight -= 1
            self._metrics.requests.labels(replica.name, end).inc()
        return end not in ("lost", "busy")
