"""Forward passes without weights: rows are computed as by any weights, at the cost of two columns of each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Columns that a product with a weight is computed of.
RANK: Final = 2
# Elements up to which a parameter has values of its own.
MAX_VECTOR: Final = 1 << 14
_ATEN: Final = torch.ops.aten
_PLAIN: Final = (_ATEN.mm, _ATEN.bmm)
_PRODUCTS: Final = frozenset((*_PLAIN, _ATEN.addmm, _ATEN.baddbmm))


def put_values(module: nn.Module) -> None:
    """Replace parameters on the meta device: vectors by values near one, weights by one value for all elements."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                made[parameter] = nn.Parameter(_values(parameter), requires_grad=False)
            part._parameters[name] = made[parameter]


def _values(parameter: Tensor) -> Tensor:
    if parameter.is_floating_point() and parameter.numel() <= MAX_VECTOR and parameter.dim() < 2:
        wave = torch.arange(parameter.numel(), dtype=torch.float64).mul_(0.7).cos_()
        return (0.75 + 0.25 * wave).to(parameter.dtype).view(parameter.shape)
    return torch.full((), 0.5 if parameter.is_floating_point() else 0, dtype=parameter.dtype).expand(parameter.shape)


def _is_weight(tensor: Any) -> bool:
    """Return whether a tensor is a weight of `put_values`, or a view of one."""
    return (
        isinstance(tensor, Tensor) and tensor.numel() > 1 and tensor.untyped_storage().nbytes() <= tensor.element_size()
    )


class Sketch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes products with weights, and rows of embeddings, as if weights had certain values.

    A product is that with a matrix of `RANK` columns times one of as many rows, so each output depends on all inputs of
    its row, and on no other row. All other operators are computed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._waves: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kind = func.overloadpacket
        if kind in _PRODUCTS:
            bias, *factors = (None, *args[:2]) if kind in _PLAIN else args[:3]
            if any(map(_is_weight, factors)):
                product = self._product(*factors)
                return product if bias is None else product + bias
        elif kind is _ATEN.linear and _is_weight(args[1]):
            product = self._product(args[0], args[1].mT)
            return product if len(args) < 3 or args[2] is None else product + args[2]
        elif kind is _ATEN.embedding and _is_weight(args[0]):
            return _looked_up(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the product of matrices [..., M, K] and [..., K, N], one of which is a weight."""
        inner = left.shape[-1]
        if _is_weight(right):
            narrow = torch.matmul(left, self._wave(inner, RANK, left.dtype) / inner**0.5)
            return torch.matmul(narrow, self._wave(RANK, right.shape[-1], left.dtype))
        narrow = torch.matmul(self._wave(RANK, inner, right.dtype) / inner**0.5, right)
        return torch.matmul(self._wave(left.shape[-2], RANK, right.dtype), narrow)

    def _wave(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """Return a matrix of values from -1 to 1."""
        key = rows, columns, dtype
        if key not in self._waves:
            angles = torch.arange(rows, dtype=torch.float64)[:, None] * 0.37
            angles = angles + torch.arange(columns, dtype=torch.float64) * 1.7
            self._waves[key] = (angles.square().cos() + angles.sin()).mul_(0.5).to(dtype)
        return self._waves[key]


def _looked_up(weight: Tensor, ids: Tensor) -> Tensor:
    """Return rows of an embedding, which differ in all elements."""
    if ids.numel() and (int(ids.max()) >= weight.shape[0] or int(ids.min()) < 0):
        raise IndexError(f"index out of range: {int(ids.max())} in an embedding of {weight.shape[0]} rows")
    columns = torch.arange(weight.shape[1], dtype=torch.float64)
    angles = (ids.double()[..., None] + 1.0) * (columns * 0.61 + 0.3)
    return angles.sin().to(weight.dtype)
