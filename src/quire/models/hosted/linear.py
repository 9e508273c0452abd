"""Linear layers of transformers' modules on the backend's packed weights, and the look-up of tokens in a tied head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quire.models.modules.projections import Projection
from quire.models.specs.parameter_counts import DOWN_GROUP
from quire.ops.interface.ops import Ops, RoundsInputs

# Layers with fewer outputs keep 8 bits: routers and gates are narrow, and rounding them changes which experts run.
MIN_OUTPUTS_OF_4_BITS: Final = 512
# Inputs per output of the last projection of an MLP, whose inputs have the largest outliers.
DOWN_RATIO: Final = 2


class LayerUse(NamedTuple):
    """The use of a module's linear layers and embeddings in a step, by name.

    Args:
        kept: layers whose weights are read by other code than their own, which must stay tensors.
        adapted: linear layers that take all rows of a step in each of their calls: the others cannot take adapters,
            which are applied by row.
    """

    kept: frozenset[str]
    adapted: frozenset[str]


UNWATCHED: Final = LayerUse(frozenset(), frozenset())


class _Watch:
    """The record of one layer."""

    def __init__(self) -> None:
        self.is_running = self.is_read = False
        self.num_rows: set[int] = set()


class WatchedLayers:
    """The layers of a module during a step; see `watch_layers`."""

    def __init__(self, layers: dict[str, nn.Module], num_rows: int) -> None:
        self._layers, self._num_rows = layers, num_rows

    @property
    def use(self) -> LayerUse:
        """The use until now."""
        watches = {name: layer.__dict__["_watch"] for name, layer in self._layers.items()}
        return LayerUse(
            frozenset(name for name, watch in watches.items() if watch.is_read),
            frozenset(
                name
                for name, watch in watches.items()
                if watch.num_rows == {self._num_rows} and not isinstance(self._layers[name], nn.Embedding)
            ),
        )


@contextmanager
def watch_layers(module: nn.Module, num_rows: int) -> Iterator[WatchedLayers]:
    """Record the use of linear layers and embeddings in a trial step of `num_rows` rows, for one thread."""
    layers = {name: leaf for name, leaf in module.named_modules() if is_packable(leaf) or type(leaf) is nn.Embedding}
    kinds: dict[str, type[nn.Module]] = {name: type(leaf) for name, leaf in layers.items()}
    watched = {kind: _watched(kind) for kind in set(kinds.values())}
    for name, leaf in layers.items():
        leaf.__dict__["_watch"] = _Watch()
        leaf.__class__ = watched[kinds[name]]
    try:
        yield WatchedLayers(layers, num_rows)
    finally:
        for name, leaf in layers.items():
            leaf.__class__ = kinds[name]


def _watched(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of layers that record their use."""

    def forward(self: Any, x: Tensor) -> Tensor:
        watch = self.__dict__["_watch"]
        watch.num_rows.add(x.numel() // x.shape[-1] if x.numel() else 0)
        watch.is_running = True
        try:
            result: Tensor = kind.forward(self, x)
        finally:
            watch.is_running = False
        return result

    def weight(self: Any) -> Tensor:
        watch = self.__dict__["_watch"]
        watch.is_read |= not watch.is_running
        parameter: Tensor = self._parameters["weight"]
        return parameter

    return type(f"Watched{kind.__name__}", (kind,), {"forward": forward, "weight": property(weight)})


def is_packable(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer; a subclass may compute something else."""
    return type(module) in (nn.Linear, Conv1D)


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer holds its weight as [in, out]."""
    return isinstance(layer, Conv1D)


class HostedLinear(nn.Module):
    """A linear layer with a packed weight, for a module of transformers.

    Args:
        projection: the packed layer; `run` is replaced when it takes adapters.
        dtype: dtype of the weight, and so of the rows.
        is_head: the layer is the output head, whose logits are computed in float32 where that costs nothing.
    """

    def __init__(self, projection: Projection, dtype: torch.dtype, *, is_head: bool) -> None:
        super().__init__()
        self._projection, self._dtype, self._is_head = projection, dtype, is_head
        self.out_features, self.in_features = projection.slots["weight"].shape

    def forward(self, x: Tensor) -> Tensor:
        """Return the product of `x` [..., in], [..., out]."""
        if x.dtype is not self._dtype:  # packed kernels take the rows' bits as they are
            raise TypeError(f"a linear layer of {self._dtype} got rows of {x.dtype}")
        run, rows = self._projection.run, x.reshape(-1, self.in_features)
        if self._is_head and isinstance(run, RoundsInputs) and run.rounds_inputs:
            rows = rows.float()
        return run(rows if rows.stride(-1) == 1 else rows.contiguous()).view(*x.shape[:-1], self.out_features)


class HostedEmbedding(nn.Module):
    """An embedding whose rows are read from a packed weight."""

    def __init__(self, look_up: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self._look_up, self._width = look_up, width

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids` [...], [..., E]."""
        return self._look_up(ids.flatten()).view(*ids.shape, self._width)


def make_projection(layer: nn.Module, ops: Ops, *, is_head: bool) -> Projection:
    """Return an empty packed layer for a linear layer."""
    shape = layer.get_parameter("weight").shape
    out_width, in_width = shape[::-1] if is_transposed(layer) else shape
    options: dict[str, int] = {}
    if is_head:
        options["min_bits"] = 6
    elif out_width < MIN_OUTPUTS_OF_4_BITS:
        options["min_bits"] = 8
    if in_width > DOWN_RATIO * out_width:
        options["max_group"] = DOWN_GROUP
    return Projection(in_width, out_width, layer._parameters["bias"] is not None, ops, **options)
