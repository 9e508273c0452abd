"""Numbers of the ranks of a model in stages, each of which tensor parallel ranks may share.

```
              stage 0   stage 1   last stage
 tensor 0     rank 2    rank 4    rank 0        two ranks a stage: those of a stage have numbers in a row, so that
 tensor 1     rank 3    rank 5    rank 1        torchrun starts them on one host
```
"""

from __future__ import annotations

from typing import NamedTuple

from quire.config import ParallelConfig


class RankGrid(NamedTuple):
    """The ranks of a model: stages, and tensor parallel ranks in each.

    Args:
        num_stages: number of stages.
        tensor_size: number of ranks in each stage.
    """

    num_stages: int
    tensor_size: int

    @classmethod
    def of(cls, config: ParallelConfig) -> RankGrid:
        """Return the grid that the options mean."""
        return cls(config.pipeline_parallel_size, config.tensor_parallel_size)

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.num_stages * self.tensor_size

    @property
    def commanded(self) -> tuple[int, ...]:
        """Ranks of the group in which rank 0 sends commands: itself, and all that are not in its stage."""
        return (0, *range(self.tensor_size, self.size))

    def stage_of(self, rank: int) -> int:
        """Return the stage of a rank: the last one is that of rank 0."""
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
