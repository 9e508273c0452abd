"""Pipeline stages on one host, connected by memory that all ranks map.

```
 | commands | links of stages 0 and 1 | links of stages 1 and 2 | ... | sums of stage 0 | sums of stage 1 | ...
            '- a link for each tensor parallel rank, with a channel for each microbatch
```
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from torch import Tensor

from quire.config import ParallelConfig
from quire.distributed.pipeline import MAX_MESSAGE_BYTES, PipelineGroup, RankGrid, connect_stages
from quire.distributed.shared_memory import SharedMemoryTransport, make_memory, region_bytes
from quire.ops.cpu.native_library import NativeLibrary

CHANNEL_SLOT_BYTES: Final = MAX_MESSAGE_BYTES + (1 << 16)


class SharedMemoryLink:
    """One end of a link in shared memory; messages use its channels in turn: groups of a sender and a receiver."""

    def __init__(self, channels: Sequence[SharedMemoryTransport]) -> None:
        self._channels, self._turn = tuple(channels), 0

    def _next(self) -> SharedMemoryTransport:
        self._turn = (self._turn + 1) % len(self._channels)
        return self._channels[self._turn]

    def send(self, x: Tensor) -> None:
        """See `StageLink`."""
        channel = self._next()
        channel.check(channel.kernels.send(channel.call, x.data_ptr(), x.nbytes))

    def receive(self, x: Tensor) -> None:
        """See `StageLink`."""
        channel, length = self._next(), ctypes.c_int64()
        channel.check(channel.kernels.wait(channel.call, channel.call.timeout_us, length))
        assert length.value == x.nbytes, "ranks have planned different steps"
        channel.check(channel.kernels.receive(channel.call, x.data_ptr(), length.value))

    def fail(self, rank: int) -> None:
        """See `StageLink`."""
        for channel in self._channels:
            channel.fail(rank)

    def close(self) -> None:
        """See `StageLink`."""
        for channel in self._channels:
            channel.close()


class _Layout(NamedTuple):
    """Offsets of the parts of the memory, in bytes.

    Args:
        page_bytes: bytes of a group's header, before its slots.
        grid: stages and their ranks.
        num_channels: channels of a link.
    """

    page_bytes: int
    grid: RankGrid
    num_channels: int

    def channel(self, first_stage: int, tensor_rank: int, idx: int) -> int:
        """Return the offset of a channel of the link from a stage to the next."""
        commands_bytes = region_bytes(self.page_bytes, len(self.grid.commanded))
        link = first_stage * self.grid.tensor_size + tensor_rank
        channel_bytes = region_bytes(self.page_bytes, 2, CHANNEL_SLOT_BYTES)
        return commands_bytes + (link * self.num_channels + idx) * channel_bytes

    def sums(self, stage: int) -> int:
        """Return the offset of the group of a stage; `num_stages` gives the end of the memory."""
        stage_bytes = region_bytes(self.page_bytes, self.grid.tensor_size) if self.grid.tensor_size > 1 else 0
        return self.channel(self.grid.num_stages - 1, 0, 0) + stage * stage_bytes


def make_stages_memory(page_bytes: int, config: ParallelConfig) -> int:
    """Return the descriptor of new memory for all ranks of a pipeline; see `make_memory`."""
    grid = RankGrid.of(config)
    layout = _Layout(page_bytes, grid, config.num_microbatches)
    num_commanded = len(grid.commanded)
    return make_memory(page_bytes, num_commanded, layout.sums(grid.num_stages) - layout.channel(0, 0, 0))


def share_stages(
    library: NativeLibrary, descriptor: int, rank: int, config: ParallelConfig, num_cores: int
) -> PipelineGroup:
    """Return the group of a rank; all its parts are in the memory of `descriptor`."""
    grid = RankGrid.of(config)
    polls, timeout_s = grid.size <= num_cores, config.distributed_timeout_s
    join_at = partial(SharedMemoryTransport, library, descriptor, rank, timeout_s=timeout_s, polls=polls)
    layout = _Layout(library.ranks.page_bytes, grid, config.num_microbatches)

    stage, tensor_rank = grid.stage_of(rank), grid.tensor_rank_of(rank)

    def join(name: str, members: Sequence[int]) -> SharedMemoryTransport:
        return join_at(members, offset=0 if name == "commands" else layout.sums(stage))

    def link(first_stage: int) -> SharedMemoryLink:
        ends = [grid.rank_of(stage, tensor_rank) for stage in (first_stage, first_stage + 1)]
        offsets = [layout.channel(first_stage, tensor_rank, idx) for idx in range(config.num_microbatches)]
        return SharedMemoryLink([join_at(ends, offset=offset, slot_bytes=CHANNEL_SLOT_BYTES) for offset in offsets])

    return connect_stages(rank, config, join, link)
