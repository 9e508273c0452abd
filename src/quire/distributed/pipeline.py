"""A group of ranks with a stage of the model each, and the links on which hidden states go from stage to stage.

```
 ranks 2, 3   -- hidden -->  ranks 4, 5   -- hidden -->  ranks 0, 1
 stage 0                     stage 1                     last stage; on rank 0 sampling, engine
```

Rank 0, which has the texts and draws tokens, has the last stage: so tokens reach the first stage with the commands that
all ranks repeat, and nothing else travels. All ranks plan alike, so a receiver knows the shape of what comes.

Where tensor parallel ranks share a stage, they sum among themselves, and all have the same hidden states: each sends
them to the rank with its own number in the stage behind.

A sender never waits for the receiver of an earlier microbatch, or ranks could wait for each other: a link has as many
channels as there are microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from quire.distributed.rank_grid import RankGrid
from quire.distributed.rank_group import RankGroup
from quire.distributed.transport import Transport

# Bytes of the longest message: larger ones would go in parts, which wait for the receiver. Memory is taken only where
# messages are written.
MAX_MESSAGE_BYTES: Final = 1 << 28


class StageLink(Protocol):
    """One end of the link between two stages."""

    def send(self, x: Tensor) -> None:
        """Send a contiguous tensor; the receiver of the one before may not have taken it yet.

        Raises:
            RankFailed: a rank has ended, or does not answer in time.
        """

    def receive(self, x: Tensor) -> None:
        """Fill a contiguous tensor with what the other end sends next.

        Raises:
            RankFailed: a rank has ended, or does not answer in time.
        """

    def fail(self, rank: int) -> None:
        """End the waits here because a rank has failed."""

    def close(self) -> None:
        """Let go of what the link holds."""


class PipelineGroup(RankGroup):
    """The ranks of a model in stages.

    Args:
        rank: number of this rank.
        grid: stages and their ranks.
        commands: mover of the commands of rank 0 between `grid.commanded`; None on the other ranks of the last stage,
            which get them from `tensor`.
        source: link from the stage before; None on the first stage.
        target: link to the stage behind; None on the last one.
        tensor: the tensor parallel ranks of this rank's stage; None where it is alone there.

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
        """Send hidden states to the stage behind."""
        assert self._target is not None, "nothing follows the last stage"
        self._target.send(x.contiguous())

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the hidden states of the stage before, of this shape and dtype."""
        assert self._source is not None, "nothing comes before the first stage"
        x = torch.empty(*shape, dtype=dtype)
        self._source.receive(x)
        return x

    def all_reduce(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the sum of `x` over all ranks of all stages, while none of them is in a step; see `RankGroup`."""
        if self.tensor is None:
            return super().all_reduce(x, residual)
        total = self.tensor.all_reduce(x)
        if self.rank in self.grid.commanded:
            # In the group of commands, each stage's sum is that of its first rank.
            is_first = self.grid.tensor_rank_of(self.rank) == 0
            total = super().all_reduce(total if is_first else torch.zeros_like(total))
        if not self.runs_ahead:  # of this stage, rank 0 alone has that
            total = self.tensor.all_reduce(total if self.rank == 0 else torch.zeros_like(total))
        return total if residual is None else total + residual

    def send_commands(self, commands: bytes) -> None:
        """See `RankGroup`: first to the other stages, where steps begin, then to the ranks of this one."""
        super().send_commands(commands)
        if self.tensor is not None:
            self.tensor.send_commands(commands)

    def receive_commands(self) -> bytes:
        """See `RankGroup`."""
        if self.tensor is None or self.runs_ahead:
            return super().receive_commands()
        return self.tensor.receive_commands()  # some came while the head was served

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
