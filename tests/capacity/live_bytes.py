"""The bytes of the tensors that live at the same time while something runs, and the steps that are measured so."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.execution.profile.gpu_memory_profile import HUNGRY, SORTING, Items, StepLimits, plan_of
from quire.execution.runners.build import build_runner
from quire.execution.sampling.device.device_draws import TorchDraws
from quire.execution.sampling.sampler import Sampler
from quire.models.modules.decoder import Decoder


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators return: not what they have for themselves, nor numbers of the host.

    Args:
        collects: tensors that are only in reference cycles do not count: Triton's interpreter leaves arguments of its
            launches there.

    Attributes:
        peak: most bytes at any moment.
    """

    def __init__(self, *, collects: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._live: dict[int, int] = {}
        self._collects = collects

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # What was written to is not new; after the call, since it may have been given other memory by it.
        given = {id_of(each) for each in tree_leaves((args, kwargs)) if is_strided(each)}
        for each in tree_leaves(result):
            if is_strided(each) and id_of(each) not in given and id_of(each) not in self._live:
                self._add(each.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        self._live[storage._cdata] = storage.nbytes()
        self._now += storage.nbytes()
        weakref.finalize(storage, self._remove, storage._cdata)
        if self._collects and self._now > self.peak:
            gc.collect()
        self.peak = max(self.peak, self._now)

    def _remove(self, storage_id: int) -> None:
        self._now -= self._live.pop(storage_id)


def is_strided(value: object) -> bool:
    """Return whether a value is a tensor that has a storage: packed weights of oneDNN have none."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def id_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from that of others."""
    return int(tensor.untyped_storage()._cdata)


def peak_of(decoder: Decoder, limits: StepLimits, *, collects: bool = False) -> Callable[[Items], int]:
    """Return a function that runs a step as an engine on a GPU does to measure it, and says what it took in bytes."""

    def peak_bytes(items: Items) -> int:
        return max(measure(items, params) for params in (HUNGRY, SORTING))

    def measure(items: Items, params: Any) -> int:
        num_groups = len(decoder.cache_groups)
        runner = build_runner(
            decoder, num_blocks=[2] * num_groups, block_size=limits.block_size, device="cpu", dtype=decoder.dtype
        )
        for storage in runner._storages:
            storage.data.zero_()  # nobody wrote what the steps read: it could be NaN
        if runner._sampler._rows is None:  # on a GPU all backends have it
            runner._sampler = Sampler(decoder.device, None, decoder.ops.apply_token_bitmask, TorchDraws())
        if collects:  # what is there already need not be looked at each time
            gc.collect()
            gc.freeze()
        try:
            with LiveBytes(collects=collects) as live:
                runner.execute(plan_of(items, limits, num_groups, params))
        finally:
            if collects:
                gc.unfreeze()
        return int(live.peak)

    return peak_bytes
