"""The KV cache memory that all cache groups share, and each group's view of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from quire.config import CACHE_DTYPES, CacheDtype
from quire.models.specs.cache_layout import state_bytes
from quire.models.specs.spec import LayerGroup, StateCacheShape, TokenCacheShape
from quire.models.tensors.dtypes import DTYPES
from quire.platform.huge_pages import empty_bytes

# The torch dtypes of the names in `CACHE_DTYPES`.
STORED: Final = {**DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


class KVStorage:
    """The keys and values of one cache group.

    A block holds all layers contiguously, so that copy-on-write, swap and disk move one range of bytes. The memory is
    not initialised: a page is not resident before a token is stored in it, and unwritten slots have arbitrary contents.
    """

    __slots__ = ("block_rows", "data", "dtype", "head_dim", "slot_rows")

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Tensor | None = None,
        stored: str | None = None,
    ) -> None:
        self.head_dim, self.dtype = head_dim, dtype
        element = dtype if stored is None else STORED[stored]
        width = head_dim if stored is None else head_dim + CACHE_DTYPES[stored].scale_bytes // element.itemsize
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, width)
        num_bytes = math.prod(shape) * element.itemsize
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.data = memory[:num_bytes].view(element).view(shape)
        rows = self.data.view(-1, block_size * width)
        slots = self.data.view(-1, width)
        # Each layer's view starts at the layer's offset, so that the same row ids serve all layers of a step.
        layer_rows = 2 * num_kv_heads
        self.block_rows: tuple[Tensor, ...] = tuple(rows[layer * layer_rows :] for layer in range(num_layers))
        self.slot_rows: tuple[Tensor, ...] = tuple(
            slots[layer * layer_rows * block_size :] for layer in range(num_layers)
        )


class StateStorage:
    """The states of one cache group: a block is one state, of all layers.

    ```
     a block   | layer 0                      | layer 1 ...
               | sums, float32 | last inputs  |
    ```
    """

    __slots__ = ("conv_states", "data", "ssm_states")

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        cache: StateCacheShape,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Tensor | None = None,
    ) -> None:
        layer_bytes = state_bytes(cache, dtype.itemsize)
        num_bytes = num_blocks * num_layers * layer_bytes
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.data = memory[:num_bytes].view(num_blocks, num_layers * layer_bytes)
        layers = self.data.view(num_blocks, num_layers, layer_bytes)
        inputs_end = cache.sum_bytes + cache.num_inputs * dtype.itemsize
        ssm_states = layers[:, :, : cache.sum_bytes].view(torch.float32).view(num_blocks, num_layers, *cache.sums)
        conv_states = layers[:, :, cache.sum_bytes : inputs_end].view(dtype)
        conv_states = conv_states.view(num_blocks, num_layers, cache.num_columns, cache.num_channels)
        self.conv_states: tuple[Tensor, ...] = conv_states.unbind(1)
        self.ssm_states: tuple[Tensor, ...] = ssm_states.unbind(1)


Storage = KVStorage | StateStorage


def make_storages(
    groups: Sequence[LayerGroup],
    num_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    stored: str | None = None,
) -> tuple[Storage, ...]:
    """Allocate one range of bytes that all cache groups of a model share.

    Args:
        groups: layer groups of the model.
        num_blocks: B of each of them, the null block included: the size of its view of the shared bytes.
        block_size: N.
        dtype: dtype of keys, values and the inputs of convolutions.
        stored: see `KVStorage`; states stay as they are.
    """
    name = stored or str(dtype).removeprefix("torch.")
    sizes = [
        count * _block_bytes(group, block_size, CACHE_DTYPES[name], dtype)
        for group, count in zip(groups, num_blocks, strict=True)
    ]
    is_on_cpu = torch.device(device).type == "cpu"
    memory = empty_bytes(max(sizes)) if is_on_cpu else torch.empty(max(sizes), dtype=torch.uint8, device=device)
    storages: list[Storage] = []
    for (num_layers, cache), count in zip(groups, num_blocks, strict=True):
        match cache:
            case TokenCacheShape():
                shape = (count, num_layers, block_size, cache.num_kv_heads, cache.head_dim)
                storages.append(KVStorage(*shape, dtype, device, memory, stored))
            case StateCacheShape():
                storages.append(StateStorage(count, num_layers, cache, dtype, device, memory))
    return tuple(storages)


def _block_bytes(group: LayerGroup, block_size: int, stored: CacheDtype, dtype: torch.dtype) -> int:
    num_layers, cache = group
    match cache:
        case TokenCacheShape():
            slot_bytes = cache.head_dim * stored.element_bytes + stored.scale_bytes
            return num_layers * 2 * cache.num_kv_heads * block_size * slot_bytes
        case StateCacheShape():
            return num_layers * state_bytes(cache, dtype.itemsize)
