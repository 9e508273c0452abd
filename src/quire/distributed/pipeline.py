"""A group of ranks with a stage of the model each, and the links on which hidden states go from stage to stage.

```
 rank 1      -- hidden -->  rank 2      -- hidden -->  rank 0
 stage 0                    stage 1                    last stage, sampling, engine
```

Rank 0, which has the texts and draws tokens, has the last stage: so tokens reach the first stage with the commands that
all ranks repeat, and nothing else travels. All ranks plan alike, so a receiver knows the shape of what comes.

A sender never waits for the receiver of an earlier microbatch, or ranks could wait for each other: a link has as many
channels as there are microbatches.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from quire.distributed.rank_group import RankGroup
from quire.distributed.shared_memory import SharedMemoryTransport, region_bytes
from quire.distributed.transport import Transport
from quire.errors import RankFailed
from quire.ops.native_library import NativeLibrary

# Bytes of the longest message: larger ones would go in parts, which wait for the receiver. Memory is taken only where
# messages are written.
MAX_MESSAGE_BYTES: Final = 1 << 28
CHANNEL_SLOT_BYTES: Final = MAX_MESSAGE_BYTES + (1 << 16)


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


class PipelineGroup(RankGroup):
    """The ranks of a model in stages.

    Args:
        transport: mover of the commands of rank 0.
        source: link from the stage before; None on the first stage.
        target: link to the stage behind; None on the last one.

    Attributes:
        stage: number of this rank's stage.
    """

    def __init__(self, transport: Transport, source: StageLink | None, target: StageLink | None) -> None:
        super().__init__(transport)
        self.stage = stage_of(self.rank, self.size)
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

    def fail(self, rank: int) -> None:
        """See `RankGroup`."""
        super().fail(rank)
        for link in (self._source, self._target):
            if link is not None:
                link.fail(rank)


def stage_of(rank: int, size: int) -> int:
    """Return the stage of a rank: the last one is that of rank 0."""
    return (rank - 1) % size


def rank_of(stage: int, size: int) -> int:
    """Return the rank of a stage."""
    return (stage + 1) % size


class _Channel(SharedMemoryTransport):
    """A group of two ranks of a pipeline, of which the first one sends.

    Args:
        peer: rank of the pipeline at the other end.
    """

    def __init__(self, *arguments: Any, peer: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._peer = peer

    def put(self, x: Tensor) -> None:
        """Send a contiguous tensor."""
        self.check(self._kernels.send(self.call, x.data_ptr(), x.nbytes))

    def take(self, x: Tensor) -> None:
        """Fill `x` with the next message."""
        length = ctypes.c_int64()
        self.check(self._kernels.wait(self.call, self.call.timeout_us, length))
        assert length.value == x.nbytes, "ranks have planned different steps"
        self.check(self._kernels.receive(self.call, x.data_ptr(), length.value))

    def check(self, status: int) -> None:
        if status < 0:
            self.fail(self._peer)
            raise RankFailed(self._peer, f"did not answer within {self.call.timeout_us / 1e6:g} s")
        super().check(status)


class SharedMemoryLink:
    """One end of a link in shared memory.

    Args:
        channels: its channels, which take turns.
    """

    def __init__(self, channels: Sequence[_Channel]) -> None:
        self._channels, self._turn = tuple(channels), 0

    def _next(self) -> _Channel:
        self._turn = (self._turn + 1) % len(self._channels)
        return self._channels[self._turn]

    def send(self, x: Tensor) -> None:
        """See `StageLink`."""
        self._next().put(x)

    def receive(self, x: Tensor) -> None:
        """See `StageLink`."""
        self._next().take(x)

    def fail(self, rank: int) -> None:
        """See `StageLink`."""
        for channel in self._channels:
            channel.fail(rank)


def links_bytes(page_bytes: int, size: int, num_channels: int) -> int:
    """Return the bytes of shared memory that all links take, behind those of the group."""
    return (size - 1) * num_channels * region_bytes(page_bytes, 2, CHANNEL_SLOT_BYTES)


def share_links(
    library: NativeLibrary,
    descriptor: int,
    transport: SharedMemoryTransport,
    num_channels: int,
    timeout_s: float,
    num_cores: int,
) -> PipelineGroup:
    """Return the group of a rank whose links lie in the memory of its transport.

    Args:
        library: compiled kernels.
        descriptor: that memory.
        transport: the rank's transport.
        num_channels: number of microbatches.
        timeout_s: see `SharedMemoryTransport`.
        num_cores: see `SharedMemoryTransport`.
    """
    rank, size = transport.rank, transport.size
    page_bytes = library.ranks.page_bytes
    start, length = region_bytes(page_bytes, size), region_bytes(page_bytes, 2, CHANNEL_SLOT_BYTES)

    def link(first_stage: int, own: int, peer: int) -> SharedMemoryLink:
        options = {"slot_bytes": CHANNEL_SLOT_BYTES, "peer": peer}
        offsets = [start + (first_stage * num_channels + idx) * length for idx in range(num_channels)]
        return SharedMemoryLink(
            [
                # Ranks spin as they do for sums: all of them have a core or none.
                _Channel(library, os.dup(descriptor), own, 2, timeout_s, num_cores - size + 2, offset=offset, **options)
                for offset in offsets
            ]
        )

    stage = stage_of(rank, size)
    source = None if stage == 0 else link(stage - 1, 1, rank_of(stage - 1, size))
    target = None if stage == size - 1 else link(stage, 0, rank_of(stage + 1, size))
    return PipelineGroup(transport, source, target)
