"""Forwarding: which servers a request is sent to, and what happens if one fails.

```
 a prompt           the router's server; if it fails before the first byte, another one
 all servers' state every server: adapters, pins, resets; the answer is the first error, or else the first answer
 all others         a server that takes requests
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from quire.fleet.proxy.broadcasts import LISTS, Broadcasts
from quire.fleet.proxy.exchange import Exchange, TimeLimits
from quire.fleet.proxy.fleet import Fleet
from quire.fleet.proxy.metrics import ProxyMetrics
from quire.fleet.proxy.prompts import RoutedPrompts
from quire.fleet.proxy.replica import Replica
from quire.fleet.proxy.shared_state import NAME_OF
from quire.fleet.proxy.streams import PATHS
from quire.fleet.proxy.suspects import MAX_LOSSES, Suspects, Turn
from quire.fleet.proxy.upstream import UpstreamLost
from quire.fleet.routing.retry_budget import RetryBudget
from quire.fleet.routing.router import Route

# Servers that may fail on a request before it is given up.
MAX_FAILED: Final = 2
# Chooses a server that is not among the tried ones, for a prompt with its route; None if there is none.
Choose = Callable[[Sequence[str]], tuple[Replica, Route | None] | None]


class Forwarder:
    """Sends requests to servers, by their routes.

    Attributes:
        suspects: requests that were in flight when their server was lost.
        budget: budget of retries.
        num_in_flight: requests that have not ended.
    """

    def __init__(self, fleet: Fleet, prompts: RoutedPrompts, metrics: ProxyMetrics) -> None:
        self._fleet = fleet
        self._prompts = prompts
        self._metrics = metrics
        self._broadcasts = Broadcasts(fleet, prompts.tenant_header)
        self._limits = TimeLimits(fleet.policy.first_byte_timeout_s, fleet.policy.idle_timeout_s)
        self.suspects = Suspects()
        self.budget = RetryBudget(fleet.policy.retry_share, fleet.policy.retry_min_per_s)
        self.num_in_flight = 0

    def describe(self) -> dict[str, Any]:
        """Return the state of retries and suspects, for operators."""
        now_s = asyncio.get_running_loop().time()
        return {
            "num_in_flight": self.num_in_flight,
            "num_retries_left": int(self.budget.num_left(self.num_in_flight, now_s)),
            "num_retries_refused": self.budget.num_refused,
            "num_suspects": self.suspects.num_suspects,
            "num_suspects_waiting": self.suspects.num_waiting,
            "num_suspects_refused": self.suspects.num_refused,
        }

    async def forward(self, exchange: Exchange) -> None:
        """Have servers answer a request."""
        self.budget.add_request(asyncio.get_running_loop().time())
        self.num_in_flight += 1
        try:
            is_change = exchange.path in NAME_OF and exchange.method == "POST"
            if is_change or (exchange.method == "POST" and exchange.path not in PATHS and self._fleet.is_mixed):
                await self._prompts.read_fields(exchange)
            if is_change:
                await self._broadcasts.change(exchange)
            elif exchange.path in PATHS and exchange.method == "POST":
                await self._route(exchange)
            elif exchange.path in LISTS and exchange.method == "GET" and self._fleet.is_mixed:
                await self._broadcasts.list_models(exchange)
            else:
                await self._try_servers(exchange, lambda tried: self._next_of(exchange, tried))
        finally:
            self.num_in_flight -= 1

    async def _route(self, exchange: Exchange) -> None:
        """Send a request to the best server in the router's order; if it fails, to the next."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        request = await self._prompts.request_of(exchange)

        def choose(tried: Sequence[str]) -> tuple[Replica, Route] | None:
            self._fleet.refresh()
            excluded = [*tried, *self._fleet.without_model(exchange.model)]
            route = self._fleet.router.route(request, loop.time(), excluded)
            if route is None:
                return None
            if not tried:
                self._metrics.choose_s.observe(loop.time() - started_s)
                self._metrics.prompt_tokens.inc(route.num_tokens)
                self._metrics.hit_tokens.inc(route.hit.num_tokens)
            return self._fleet.replicas[route.replica], route

        await self._try_servers(exchange, choose)

    def _next_of(self, exchange: Exchange, tried: Sequence[str]) -> tuple[Replica, None] | None:
        """Return the server with the fewest requests for a request without a cacheable prompt.

        GET requests go to the first server, because the parts of a page belong together.
        """
        without = self._fleet.without_model(exchange.model) if self._fleet.is_mixed else []
        replicas = self._fleet.available([*tried, *without])
        if exchange.method == "GET":
            replicas = [replica for replica in self._fleet.replicas.values() if replica in replicas]
        return (replicas[0], None) if replicas else None

    async def _try_servers(self, exchange: Exchange, choose: Choose) -> None:
        """Have a server answer a request; if one fails before the first byte, another one, as far as policies allow.

        A failure that repeats at another server is the request's own, and counts against no server.
        """
        self.suspects.check(exchange)
        tried: list[str] = []
        num_lost = num_failed = 0
        failed: Attempt | None = None
        turn: Turn | None = None
        try:
            while (chosen := choose(tried)) is not None:
                attempt = Attempt(self._fleet, *chosen, failed, turn)
                end = await attempt.run(exchange, self._limits)
                self._metrics.requests.labels(attempt.replica.name, end).inc()
                if end in ("answered", "left", "cut off"):
                    return
                if end == "late":
                    raise exchange.late()
                if end == "lost":
                    num_lost += 1
                    if num_lost == MAX_LOSSES:
                        raise self.suspects.refuse(exchange)
                    turn = await self.suspects.wait_for_turn(exchange, attempt.age_s, self._limits.first_byte_s)
                    if turn is None:
                        return
                elif end in ("busy", "failed", "damaged"):
                    num_failed += end != "busy"
                    if end == "failed" and failed is not None:
                        attempt.forgive_failure()
                        failed.forgive_failure()
                    elif end == "failed":
                        failed = attempt
                    now_s = asyncio.get_running_loop().time()
                    if num_failed == MAX_FAILED or not self.budget.take(self.num_in_flight, now_s):
                        break
                tried.append(attempt.replica.name)
                self._metrics.retries.labels(end).inc()
        finally:
            if failed is not None:
                failed.count_failure()
            if turn is not None:
                turn.end()
        await exchange.give_up(bool(tried))


class Attempt:
    """One attempt to have a server answer a request.

    Args:
        fleet: the servers.
        replica: the server.
        route: route of the request, if it has a prompt; it ends with the attempt.
        failed: earlier attempt whose server has failed; if this server answers, that failure counts.
        turn: turn of a suspect, which ends with the answer's first byte.
    """

    def __init__(
        self, fleet: Fleet, replica: Replica, route: Route | None, failed: Attempt | None, turn: Turn | None
    ) -> None:
        self.replica = replica
        self.age_s = 0.0
        self._end = "left"
        self._fleet = fleet
        self._route = route
        self._failed = failed
        self._turn = turn
        self._is_trial = False
        self._is_counted = False

    async def run(self, exchange: Exchange, limits: TimeLimits) -> str:
        """Send the request, and return how it ended; see `Exchange.attempt`."""
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        replica = self.replica
        self._is_trial = replica.breaker.begin(started_s)
        replica.num_in_flight += 1
        try:
            self._end = await exchange.attempt(
                replica.upstream, lambda: replica.name, self._begin, self._lose, limits, holds_failures=True
            )
            if self._end == "busy" and exchange.last_busy is not None:
                replica.refuse_for(exchange.last_busy[1])
            return self._end
        finally:
            replica.num_in_flight -= 1
            self.age_s = loop.time() - started_s
            if self._end != "failed":
                self.forgive_failure()
            if self._route is not None:
                self._fleet.router.end(self._route)

    def count_failure(self) -> None:
        """Count the answer with an error status against the server."""
        if not self._is_counted:
            self._is_counted = True
            self._fleet.fail(self.replica, "it answers with errors", is_trial=self._is_trial)

    def forgive_failure(self) -> None:
        """Count nothing against the server, unless that was done; a trial has no result."""
        if self._is_trial and not self._is_counted:
            self.replica.breaker.end_trial()
        self._is_counted = True

    def _begin(self, is_stream: bool) -> None:
        """Take the first part of the answer."""
        self._is_counted = True
        self._fleet.succeed(self.replica, is_trial=self._is_trial)
        if is_stream and self._route is not None:  # an answer in one piece arrives with its last token
            self._fleet.router.on_first_token(self._route, asyncio.get_running_loop().time())
        if self._failed is not None:
            self._failed.count_failure()
        if self._turn is not None:
            self._turn.end()

    def _lose(self, error: UpstreamLost) -> None:
        """Take the loss of the server, at any time of the attempt."""
        is_trial, self._is_counted = self._is_trial and not self._is_counted, True
        self.replica.lose(error)
        self._fleet.fail(self.replica, str(error), is_trial=is_trial)
