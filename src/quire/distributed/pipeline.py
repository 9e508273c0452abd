"""A group of ranks with a stage of the model each, and the links that carry hidden states from stage to stage.

```
 ranks 2, 3   -- hidden -->  ranks 4, 5   -- hidden -->  ranks 0, 1
 stage 0                     stage 1                     last stage; on rank 0 sampling, engine
```

Rank 0, which samples tokens, has the last stage. So tokens reach the first stage with the commands that all ranks
repeat, and only hidden states are sent in addition. All ranks plan alike, so a receiver knows their shape.

Tensor parallel ranks of a stage sum among themselves, and all have the same hidden states: each sends them to the rank
with its own number in the next stage.

A sender must not wait for the receiver of an earlier microbatch, or ranks could wait for each other in a circle: a link
has a channel for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from quire.config import ParallelConfig
from quire.distributed.rank_group import RankGroup
from quire.distributed.transport import StageLink, Transport

# Bytes of the longest message: larger ones would be sent in parts, which wait for the receiver. The system allocates
# only pages that messages are written to.
MAX_MESSAGE_BYTES: Final = 1 << 28


class RankGrid(NamedTuple):
    """The ranks of a model: stages, and tensor parallel ranks in each.

    ```
                  stage 0   stage 1   last stage
     tensor 0     rank 2    rank 4    rank 0        two ranks per stage: ranks of a stage have consecutive numbers, so
     tensor 1     rank 3    rank 5    rank 1        torchrun starts them on one host
    ```

    Args:
        num_stages: number of stages.
        tensor_size: number of ranks in each stage.
    """

    num_stages: int
    tensor_size: int

    @classmethod
    def of(cls, config: ParallelConfig) -> RankGrid:
        """Return the grid for the options."""
        return cls(config.pipeline_parallel_size, config.tensor_parallel_size)

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.num_stages * self.tensor_size

    @property
    def commanded(self) -> tuple[int, ...]:
        """Ranks of the group in which rank 0 sends commands: itself, and all ranks of other stages."""
        return (0, *range(self.tensor_size, self.size))

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank; rank 0 has the last stage."""
        return (rank // self.tensor_size - 1) % self.num_stages

    def tensor_rank_of(self, rank: int) -> int:
        """Return the number of a rank in its stage."""
        return rank % self.tensor_size

    def rank_of(self, stage: int, tensor_rank: int = 0) -> int:
        """Return a rank of a stage, given its number there."""
        return (stage + 1) % self.num_stages * self.tensor_size + tensor_rank

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return the ranks of a stage."""
        first = self.rank_of(stage)
        return tuple(range(first, first + self.tensor_size))


class PipelineGroup(RankGroup):
    """The ranks of a model in stages.

    Args:
        rank: number of this rank.
        grid: stages and their ranks.
        commands: transport of rank 0's commands to `grid.commanded`; None on the other ranks of the last stage, which
            get them from `tensor`.
        source: link from the previous stage; None on the first stage.
        target: link to the next stage; None on the last one.
        tensor: the tensor parallel ranks of this rank's stage; None if it is alone there.

    Attributes:
        grid, tensor: the arguments of these names.
        stage: number of this rank's stage.
    """

    def __init__(
        self,
        rank: int,
        grid: RankGrid,
        commands: Transport | None,
        source: StageLink | None,
        target: StageLink | None,
        tensor: RankGroup | None = None,
    ) -> None:
        transport = commands
        if transport is None:
            assert tensor is not None, "a rank alone in its stage gets commands itself"
            transport = tensor.transport
        super().__init__(transport)
        self.rank, self.size = rank, grid.size
        self.grid, self.tensor = grid, tensor
        self.stage = grid.stage_of(rank)
        self.runs_ahead = self.stage < grid.num_stages - 1
        self._source, self._target = source, target

    def send(self, x: Tensor) -> None:
        """Send hidden states to the next stage."""
        assert self._target is not None, "nothing follows the last stage"
        self._target.send(x.contiguous())

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the next hidden states of the previous stage, of this shape and dtype."""
        assert self._source is not None, "nothing comes before the first stage"
        x = torch.empty(*shape, dtype=dtype)
        self._source.receive(x)
        return x

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of `x` over all ranks of all stages, outside of steps; see `RankGroup`."""
        if self.tensor is None:
            return super().all_reduce(x, residual)
        total = self.tensor.all_reduce(x)
        if self.rank in self.grid.commanded:
            # In the group of commands, the first rank of each stage contributes its stage's sum.
            is_first = self.grid.tensor_rank_of(self.rank) == 0
            total = super().all_reduce(total if is_first else torch.zeros_like(total))
        if not self.runs_ahead:  # in this stage, only rank 0 has the total
            total = self.tensor.all_reduce(total if self.rank == 0 else torch.zeros_like(total))
        return total if residual is None else total + residual

    def send_commands(self, commands: bytes) -> None:
        """See `RankGroup`: first to the other stages, since steps begin there, then to the ranks of this one."""
        super().send_commands(commands)
        if self.tensor is not None:
            self.tensor.send_commands(commands)

    def receive_commands(self) -> bytes:
        """See `RankGroup`."""
        if self.tensor is None or self.runs_ahead:
            return super().receive_commands()
        return self.tensor.receive_commands()  # possibly commands that arrived during `serve_head`

    def fail(self, rank: int) -> None:
        """See `RankGroup`."""
        super().fail(rank)
        for part in (self._source, self._target, self.tensor):
            if part is not None:
                part.fail(rank)

    def close(self) -> None:
        """See `RankGroup`."""
        super().close()
        for part in (self._source, self._target, self.tensor):
            if part is not None:
                part.close()


def connect_stages(
    rank: int,
    config: ParallelConfig,
    join: Callable[[str, Sequence[int]], Transport],
    link: Callable[[int], StageLink],
    sums: Transport | None = None,
) -> PipelineGroup:
    """Return the group of a rank. All ranks join its parts in the same order, since joining waits for all members."""
    grid = RankGrid.of(config)
    stage, commands, tensor = grid.stage_of(rank), None, None
    if rank in grid.commanded:
        commands = join("commands", grid.commanded)
    if grid.tensor_size > 1:
        sums = sums or join(f"stage-{stage}", grid.ranks_of(stage))
        tensor = RankGroup(sums, divides_experts=config.enable_expert_parallel)
    source = None if stage == 0 else link(stage - 1)
    target = None if stage == grid.num_stages - 1 else link(stage)
    return PipelineGroup(rank, grid, commands, source, target, tensor)
