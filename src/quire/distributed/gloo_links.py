"""Links between stages by torch's gloo: between hosts, and where there are no native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from quire.config import ParallelConfig
from quire.distributed.gloo import GlooTransport, dist, end_group, make_group
from quire.distributed.pipeline import PipelineGroup
from quire.distributed.rank_grid import RankGrid
from quire.distributed.rank_group import RankGroup
from quire.distributed.transport import Transport
from quire.errors import RankFailed


class GlooLink:
    """One end of a link over sockets."""

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

    def close(self) -> None:
        """End the group, with that of the other link of this rank; see `end_group`."""
        group, self._group = [self._group], None
        self._sent.clear()
        end_group(group)


def connect_stages(
    store: Any, rank: int, config: ParallelConfig, hostname: str | None, sums: Transport | None = None
) -> PipelineGroup:
    """Return the group of a rank whose parts are connected by sockets."""
    grid, timeout_s = RankGrid.of(config), config.distributed_timeout_s
    stage, commands, tensor = grid.stage_of(rank), None, None

    def connect(name: str, members: Sequence[int]) -> Transport:
        part = dist.PrefixStore(name, store)
        return GlooTransport(part, members.index(rank), len(members), timeout_s, hostname)

    # All ranks join their groups in one order, since each waits for the others of a group.
    if rank in grid.commanded:
        commands = connect("commands", grid.commanded)
    if grid.tensor_size > 1:
        sums = sums or connect(f"stage-{stage}", grid.ranks_of(stage))
        tensor = RankGroup(sums, divides_experts=config.enable_expert_parallel)
    group = make_group(dist.PrefixStore("stages", store), rank, grid.size, timeout_s, hostname)

    def link(other_stage: int) -> GlooLink:
        return GlooLink(group, grid.rank_of(other_stage, grid.tensor_rank_of(rank)), timeout_s)

    source = None if stage == 0 else link(stage - 1)
    target = None if stage == grid.num_stages - 1 else link(stage + 1)
    return PipelineGroup(rank, grid, commands, source, target, tensor)
