"""Links between stages by torch's gloo: between hosts, and where there are no native kernels."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import Tensor

from quire.distributed.gloo import dist, make_group
from quire.distributed.pipeline import PipelineGroup, rank_of, stage_of
from quire.distributed.transport import Transport
from quire.errors import RankFailed


class GlooLink:
    """One end of a link over sockets.

    Args:
        group: group of all ranks.
        peer: rank at the other end.
        timeout_s: time within which the other end must answer.
    """

    def __init__(self, group: Any, peer: int, timeout_s: float) -> None:
        self._group, self._peer, self._timeout = group, peer, timedelta(seconds=timeout_s)
        self._turn = 0
        # Messages that are under way, with their memory: the receiver may be busy with earlier ones.
        self._sent: list[tuple[Any, Tensor]] = []

    def send(self, x: Tensor) -> None:
        """See `StageLink`."""
        self._sent = [(work, each) for work, each in self._sent if not work.is_completed()]
        self._sent.append((self._run(lambda: self._group.send([x], self._peer, self._turn)), x))
        self._turn += 1

    def receive(self, x: Tensor) -> None:
        """See `StageLink`."""
        self._run(lambda: self._group.recv([x], self._peer, self._turn).wait(self._timeout))
        self._turn += 1

    def _run(self, call: Any) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise RankFailed(self._peer, f"cannot be reached ({' '.join(str(error).split())[:120]})") from error

    def fail(self, rank: int) -> None:
        """Do nothing: the connections of a process that ends are closed, which ends the waits for it."""


def connect_links(transport: Transport, store: Any, timeout_s: float, hostname: str | None) -> PipelineGroup:
    """Return the group of a rank whose links are sockets.

    Args:
        transport: the rank's transport.
        store: store through which the ranks find each other.
        timeout_s, hostname: see `GlooTransport`.
    """
    rank, size = transport.rank, transport.size
    group = make_group(dist.PrefixStore("stages", store), rank, size, timeout_s, hostname)
    stage = stage_of(rank, size)
    source = None if stage == 0 else GlooLink(group, rank_of(stage - 1, size), timeout_s)
    target = None if stage == size - 1 else GlooLink(group, rank_of(stage + 1, size), timeout_s)
    return PipelineGroup(transport, source, target)
