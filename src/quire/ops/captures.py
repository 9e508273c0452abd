"""Steps of few rows as one native call: the kernels that a step runs are noted once, and run again for later ones.

Between the kernels of such a step, most of the time is their caller's: a tensor to write to, pointers, a call. A
capture has what kernels were given, so it runs them without that. What changes from step to step lies where it lay
when they were noted: rows and rotations are copied there, rows and block tables are structures that are rewritten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops.interface import AttentionBatch, Layers, PagedKV, PagedStates, StateBatch
from quire.ops.native_library import CaptureCalls

# Steps of more rows take so long that their calls do not show.
MAX_ROWS: Final = 32


class TurnableStep(Protocol):
    """A step's attention whose structures can be rewritten for another step.

    Attributes:
        batch: whose step it is.
    """

    batch: AttentionBatch

    def rebind(self, batch: AttentionBatch) -> None: ...


class BufferPool:
    """Memory for tensors, lent again as soon as nobody holds them.

    Replays let go of tensors in the order in which they did when their calls were noted, and no two run at once. So all
    captures share this memory, which is as large as what a step of the most rows holds at one time.
    """

    def __init__(self) -> None:
        self._lent: list[tuple[Tensor, Callable[[], Tensor | None]]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all memory that was ever lent."""
        return sum(memory.nbytes for memory, _ in self._lent)

    def take(self, shape: Sequence[int], dtype: torch.dtype, num_rows: int) -> Tensor:
        """Lend an uninitialised tensor of a step of so many rows, until it is dropped; there must be no views of it."""
        num_bytes = prod(shape) * dtype.itemsize
        free = [idx for idx, (memory, holder) in enumerate(self._lent) if len(memory) >= num_bytes and holder() is None]
        if free:
            idx = min(free, key=lambda idx: len(self._lent[idx][0]))
            memory = self._lent[idx][0]
        else:
            idx = len(self._lent)
            with torch.inference_mode(False):
                memory = torch.empty(num_bytes * MAX_ROWS // num_rows, dtype=torch.uint8)
        tensor = memory[:num_bytes].view(dtype).view(*shape)
        self._lent[idx : idx + 1] = [(memory, weakref.ref(tensor))]
        return tensor


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees all that torch is asked for in this thread.

    Tensors without content are lent; anything else may have computed something, and then what was noted is not the
    whole step.

    Attributes:
        stranger: the first other operation; None as long as there was none.
    """

    def __init__(self, buffers: BufferPool, num_rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = buffers
        self._num_rows = num_rows
        self.unsupported_op: str | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Have torch not hide this class from its compiler: to do so, it imports the compiler, for a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Lend, or note a stranger and let it compute. From then on nothing is lent: it may have made a view."""
        del types
        if (
            func is torch.ops.aten.new_empty.default
            and self.unsupported_op is None
            and not any((kwargs or {}).values())
        ):
            like, shape = args
            return self._buffers.take(shape, like.dtype, self._num_rows)
        self.unsupported_op = self.unsupported_op or str(func)
        return func(*args, **(kwargs or {}))


class Recording:
    """The calls of kernels that this thread makes within a `with` block.

    Attributes:
        num_calls: how many; -1 where one cannot be made again.
    """

    def __init__(self, calls: CaptureCalls) -> None:
        self._calls = calls
        self._handle: int | None = None
        self.num_calls = 0

    def __enter__(self) -> Recording:
        self._handle = self._calls.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.num_calls = self._calls.end(self._handle)

    def __del__(self) -> None:
        if self._handle is not None:
            self._calls.free(self._handle)

    def replay(self) -> None:
        """Make them again."""
        self._calls.replay(self._handle)


class Capture:
    """A step that can be run again.

    Args:
        recording: of its calls.
        tensors: where they read the step's tensors; output: where they write what it gives.
        steps: of its cache groups.
        storages: of the same. They are not kept: a capture is for them as long as somebody has them.
    """

    def __init__(
        self,
        recording: Recording,
        tensors: Sequence[Tensor],
        output: Tensor,
        steps: Sequence[TurnableStep],
        storages: Sequence[Any],
    ) -> None:
        self._recording = recording
        # Others than those that were lent: between replays, nobody holds the memory.
        self._tensors = [tensor.view(tensor.shape) for tensor in tensors]
        self._output = output.view(output.shape)
        self._steps = tuple(steps)
        self._caches = [weakref.ref(storage.data) for storage in storages]
        for step in steps:
            step.rebind(step.batch)  # which has it drop the storage

    def is_for(
        self,
        tensors: Sequence[Tensor],
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[Any],
    ) -> bool:
        """Return whether a step differs from this one only in what is copied or rewritten."""
        for tensor, known in zip(tensors, self._tensors, strict=True):
            if tensor.shape != known.shape or tensor.dtype != known.dtype:
                return False
        for step, cache, batch, storage in zip(self._steps, self._caches, groups, storages, strict=True):
            if not isinstance(batch, AttentionBatch) or cache() is not storage.data:
                return False
            if batch.window != step.batch.window or batch.chunk != step.batch.chunk:
                return False
        return True

    def replay(self, tensors: Sequence[Tensor], groups: Sequence[Any]) -> Tensor:
        """Run the calls for another step, one that `is_for` takes; return a copy of what they give."""
        for known, tensor in zip(self._tensors, tensors, strict=True):
            known.copy_(tensor)
        for step, batch in zip(self._steps, groups, strict=True):
            step.rebind(batch)
        self._recording.replay()
        return self._output.clone()


class CapturedLayers:
    """Layers whose steps of few rows are captured when the same number of rows comes a second time in a row.

    Layers that compute anything by other means than kernels that can be noted run as they are, for good.

    Args:
        layers: to run and to capture.
        calls: of the library whose kernels they run.
        noting: while it is entered, the list that it gives receives the steps of attention as they are made.

    Attributes:
        refusal: why nothing is captured; None where something is, or may be.
        captures: by number of rows.
        buffers: what they work in.
    """

    def __init__(
        self, layers: Layers, calls: CaptureCalls, noting: Callable[[], AbstractContextManager[Sequence[TurnableStep]]]
    ) -> None:
        self._layers = layers
        self._calls = calls
        self._noting = noting
        self._last_num_rows = 0
        self.refusal: str | None = None
        self.captures: dict[int, Capture] = {}
        self.buffers = BufferPool()

    def __call__(
        self,
        tensors: Sequence[Tensor],
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[PagedKV | PagedStates],
    ) -> Tensor:
        """Run a step."""
        num_rows = len(tensors[0])
        is_repeated, self._last_num_rows = num_rows == self._last_num_rows, num_rows
        if not 0 < num_rows <= MAX_ROWS or self.refusal is not None:
            return self._layers(tensors, groups, storages)
        capture = self.captures.get(num_rows)
        if capture is not None and capture.is_for(tensors, groups, storages):
            return capture.replay(tensors, groups)
        if not is_repeated:
            return self._layers(tensors, groups, storages)
        return self._capture(tensors, groups, storages)

    def _capture(
        self,
        tensors: Sequence[Tensor],
        groups: Sequence[AttentionBatch | StateBatch],
        storages: Sequence[PagedKV | PagedStates],
    ) -> Tensor:
        """Run a step, and note its calls."""
        num_rows = len(tensors[0])
        inputs = [self.buffers.take(tensor.shape, tensor.dtype, num_rows) for tensor in tensors]
        for known, tensor in zip(inputs, tensors, strict=True):
            known.copy_(tensor)
        watch, recording = OpRecorder(self.buffers, num_rows), Recording(self._calls)
        with self._noting() as steps, recording, watch:
            output = self._layers(inputs, groups, storages)
        are_all = len(steps) == len(groups) and all(
            step.batch is batch for step, batch in zip(steps, groups, strict=True)
        )
        if watch.unsupported_op is not None or recording.num_calls <= 0 or not are_all:
            self.refusal = f"{watch.unsupported_op or 'something'} is no native kernel that can be called again"
            self.captures.clear()
            self.buffers = BufferPool()
        else:
            self.captures[num_rows] = Capture(recording, inputs, output, steps, storages)
        return output.clone()  # the memory is the next step's
