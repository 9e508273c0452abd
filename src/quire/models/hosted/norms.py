"""Norms of transformers' modules as one call of the backend, where a trial shows that both compute the same."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from quire.ops.interface.ops import Ops

# Magnitudes of the rows of a trial: the smallest ones tell one epsilon from another.
MAGNITUDES: Final = (30.0, 1.0, 1e-1, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
# Values of 16 bits that may differ in a trial, by one rounding. A norm that rounds at another place, or adds one to its
# weight elsewhere, has other bits in a fifth of its values and more.
MOST_ROUNDED: Final = 0.01
# Relative difference of values of 32 bits in a trial, at most, whose sums have other orders.
TOLERANCE: Final = 1e-5
# Functions from a module's weight to the scale of the backend's norm: the weight, for rows that are rounded before they
# are scaled; the weight in float32, for rows that are not; and the same, increased by one.
SCALES: Final[tuple[Callable[[Tensor], Tensor], ...]] = (
    lambda weight: weight,
    lambda weight: weight.float(),
    lambda weight: weight.float() + 1.0,
)


class KnownNorm(NamedTuple):
    """The numbers by which the backend computes a module's norm.

    Args:
        scale: [E]; see `Ops.rms_norm`.
        eps: added to the mean square.
    """

    scale: Tensor
    eps: float


class HostedNorm:
    """The forward pass of a norm by the backend.

    Args:
        norm: module of transformers.
        known: numbers of the norm.
        dtype: dtype of the rows that the trial had; for others, the module's own forward pass runs.
        ops: kernels.
    """

    __slots__ = ("_dtype", "_own", "_rms_norm", "known")

    def __init__(self, norm: nn.Module, known: KnownNorm, dtype: torch.dtype, ops: Ops) -> None:
        self.known, self._dtype, self._own, self._rms_norm = known, dtype, norm.forward, ops.rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """Return the norm of each row of `x` [..., E]."""
        if x.dtype is not self._dtype:
            unchanged: Tensor = self._own(x)
            return unchanged
        scale, eps = self.known
        rows = x.reshape(-1, len(scale))
        return self._rms_norm(rows if rows.stride(-1) == 1 else rows.contiguous(), scale, eps).view(x.shape)


def use_backend_norms(module: nn.Module, ops: Ops, dtype: torch.dtype) -> None:
    """Make the norms of a module with its weights run by the backend, where a trial shows that it computes the same.

    Args:
        module: model of transformers.
        ops: kernels.
        dtype: dtype of the rows.
    """
    for part in module.modules():
        known = recognise_norm(part, ops, dtype)
        if known is not None:
            part.__dict__["forward"] = HostedNorm(part, known, dtype, ops)


@torch.inference_mode()
def recognise_norm(norm: nn.Module, ops: Ops, dtype: torch.dtype) -> KnownNorm | None:
    """Return the numbers by which `Ops.rms_norm` is a module's norm; None if the module computes anything else.

    The module is tried with random rows and a random weight: neither its class nor its code says what it computes.
    """
    names = [name for name, parameter in norm._parameters.items() if parameter is not None]
    if norm._modules or norm._buffers or len(names) != 1 or len(inspect.signature(norm.forward).parameters) != 1:
        return None
    weight = norm.get_parameter(names[0])
    if weight.dim() != 1 or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(MAGNITUDES), len(weight), generator=generator) * torch.tensor(MAGNITUDES)[:, None]
    rows = rows.to(weight.device, dtype)
    tried = (torch.rand(len(weight), generator=generator) + 0.25).to(weight.device, weight.dtype)
    copied: Any = copy.copy(norm)
    copied._parameters = {names[0]: nn.Parameter(tried, requires_grad=False)}
    try:
        wanted = copied(rows)
    except Exception:  # it takes rows of another form
        return None
    for eps in _numbers(norm):
        for scale_of in SCALES:
            if _is_same(ops.rms_norm(rows, scale_of(tried), eps), wanted):
                return KnownNorm(scale_of(weight.detach()).contiguous(), eps)
    return None


def _numbers(norm: nn.Module) -> Iterator[float]:
    """Yield the numbers among a module's attributes, one of which may be its epsilon."""
    yield from dict.fromkeys(value for value in vars(norm).values() if isinstance(value, float))


def _is_same(found: Tensor, wanted: Any) -> bool:
    """Return whether a result is the wanted one, up to the last roundings."""
    if not isinstance(wanted, Tensor) or wanted.shape != found.shape or wanted.dtype is not found.dtype:
        return False
    if found.dtype == torch.float32:
        return torch.allclose(found, wanted, TOLERANCE, 0.0)
    is_near = torch.allclose(found, wanted, 2 * torch.finfo(found.dtype).eps, 0.0)
    return is_near and float((found != wanted).float().mean()) <= MOST_ROUNDED
