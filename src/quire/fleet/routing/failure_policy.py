"""Options of a proxy's policies where servers fail: ejection, retries, and time limits."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.checks import check_positive, check_share, check_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Policies of a proxy where servers fail.

    The limit of the first byte is long because it includes a request's queue and its whole prompt, and of an answer
    that is no stream all its tokens: 131,072 tokens of a prompt at 100 tokens/s take 22 minutes.

    Args:
        eject_failures: failures in a row after which a server gets no requests for a time.
        eject_rate: share of failures among the requests of the last 10 s, at least 10, with the same effect.
        eject_time_s: seconds without requests after the first ejection; each further one doubles them.
        max_eject_time_s: maximum of these seconds.
        max_ejected: share of the servers that may be ejected at once.
        retry_share: retries of the last 10 s as a share of the requests in that time or in flight.
        retry_min_per_s: retries per second that are allowed in addition.
        first_byte_timeout_s: seconds until the first byte of an answer, after which the client gets a 504.
        idle_timeout_s: seconds between two parts of an answer, after which it ends with an error.
    """

    eject_failures: int = 3
    eject_rate: float = 0.5
    eject_time_s: float = 1.0
    max_eject_time_s: float = 30.0
    max_ejected: float = 0.5
    retry_share: float = 0.2
    retry_min_per_s: float = 3.0
    first_byte_timeout_s: float = 1800.0
    idle_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        check_whole("eject_failures", self.eject_failures, 1)
        check_share("eject_rate", self.eject_rate, 1.0, positive=True)
        check_share("max_ejected", self.max_ejected, 1.0)
        check_share("retry_share", self.retry_share, 1.0)
        check_positive("retry_min_per_s", self.retry_min_per_s, allows_zero=True)
        for name in ("eject_time_s", "max_eject_time_s", "first_byte_timeout_s", "idle_timeout_s"):
            check_positive(name, getattr(self, name))
