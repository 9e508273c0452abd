"""The requests of a server that are being tokenized or are in the engine, and the latest times to first tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quire.sequences.params import SamplingParams
from quire.server.admission.logprob_budget import LogprobReservation
from quire.server.admission.stream_merge import StreamMerger
from quire.server.admission.usage import TokenCount

if TYPE_CHECKING:
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
        tenant: tenant of the client; None if all clients are one tenant.
        started_s: time of arrival, in seconds of the monotonic clock.
        logprobs: reservation of the log probabilities in its answer.
        params: its sampling parameters.
        times: times of its first prompt; None until there is an output.
        shown_prompt: beginning of its prompts; None if prompts are not logged.
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
        """Release the reservation when sending has ended, complete or not."""
        if self.logprobs is not None:
            self.logprobs.release()


class FirstTokenRow(NamedTuple):
    """A request that has ended.

    Args:
        ended_s: time of its end, in seconds of the monotonic clock.
        tenant: tenant of the client.
        first_token_s: seconds to its first output.
    """

    ended_s: float
    tenant: str | None
    first_token_s: float


class RequestsInFlight:
    """The requests in flight by the id of their answer, and the latest times to the first token."""

    def __init__(self) -> None:
        self._tracked: dict[str, InFlightRequest] = {}
        self._ended: deque[FirstTokenRow] = deque(maxlen=1024)

    def __len__(self) -> int:
        return len(self._tracked)

    def __iter__(self) -> Iterator[InFlightRequest]:
        return iter(tuple(self._tracked.values()))

    @contextmanager
    def track(self, tracked: InFlightRequest) -> Iterator[None]:
        """List a request as in flight inside the context."""
        self._tracked[tracked.answer_id] = tracked
        try:
            yield
        finally:
            del self._tracked[tracked.answer_id]
            if tracked.first_token_s is not None:
                self._ended.append(FirstTokenRow(time.monotonic(), tracked.tenant, tracked.first_token_s))

    def ended(self) -> list[FirstTokenRow]:
        """Return the requests that ended in the last minute."""
        since_s = time.monotonic() - FIRST_TOKEN_WINDOW_S
        return [row for row in self._ended if row.ended_s >= since_s]

    def first_token_times(self, tenant: str | None) -> list[float]:
        """Return the seconds to the first token of a tenant's running and ended requests; None for all tenants."""
        times = [(row.tenant, row.first_token_s) for row in self.ended()]
        times += [(request.tenant, first_s) for request in self if (first_s := request.first_token_s) is not None]
        return [first_s for owner, first_s in times if tenant in (None, owner)]
