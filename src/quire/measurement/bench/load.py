"""Load on a server: requests are sent at their due times, until all are answered or the load is stopped."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Coroutine, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from quire.measurement.bench.client import Client, Outcome
from quire.measurement.bench.trace import TracedRequest


class Load(NamedTuple):
    """The requests that were sent, and their outcomes.

    Args:
        num_requests: number of requests to send.
        num_sent: number of requests sent.
        outcomes: outcomes of the requests that ended, in the order of their ends.
        duration_s: seconds from the first request's due time to the end of the last one.
        is_interrupted: True if the load was stopped early.
    """

    num_requests: int
    num_sent: int
    outcomes: list[Outcome]
    duration_s: float
    is_interrupted: bool


def poisson_arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Return the arrival times of a Poisson process with `rate` requests a second, in seconds from the first arrival.

    Args:
        rate: mean number of requests per second; infinite for all at once.
        count: number of requests, at least 1.
        seed: seed of the random numbers.
    """
    rng = random.Random(seed)
    return [*accumulate((rng.expovariate(rate) for _ in range(count - 1)), initial=0.0)]


async def send_at(
    client: Client, requests: Sequence[TracedRequest], arrivals: Sequence[float], stop: asyncio.Event
) -> Load:
    """Send each request at its due time, independent of earlier ones (an open loop).

    Args:
        client: client of the server.
        requests: requests to send.
        arrivals: due time of each request, in seconds from now, ascending.
        stop: event that ends the load; requests in flight are cut off.
    """
    run = _Run(client)

    async def send_all() -> None:
        async with asyncio.TaskGroup() as group:
            for request, arrival_s in zip(requests, arrivals, strict=True):
                await asyncio.sleep(run.started_s + arrival_s - time.perf_counter())
                group.create_task(run.send(request, run.started_s + arrival_s))

    return await run.until(send_all(), len(requests), stop)


async def send_in_turn(
    client: Client, requests: Sequence[TracedRequest], concurrency: int, stop: asyncio.Event
) -> Load:
    """Keep `concurrency` requests in flight: send the next one when one ends (a closed loop)."""
    run, waiting = _Run(client), iter(requests)

    async def send_next() -> None:
        for request in waiting:
            await run.send(request, time.perf_counter())

    async def send_all() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(send_next())

    return await run.until(send_all(), len(requests), stop)


class _Run:
    """The state of a load in progress."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._num_sent = 0
        self._outcomes: list[Outcome] = []
        self.started_s = time.perf_counter()

    async def send(self, request: TracedRequest, due_s: float) -> None:
        self._num_sent += 1
        self._outcomes.append(await self._client.send(request, due_s))

    async def until(self, sending: Coroutine[Any, Any, None], num_requests: int, stop: asyncio.Event) -> Load:
        """Wait until all requests have ended, or until `stop` is set."""
        tasks = asyncio.create_task(sending), asyncio.create_task(stop.wait())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended_s = time.perf_counter()
        is_interrupted = not tasks[0].done()
        for task in tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        return Load(num_requests, self._num_sent, self._outcomes, ended_s - self.started_s, is_interrupted)
