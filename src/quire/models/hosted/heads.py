"""Attention modules of transformers whose heads the backend norms and rotates, recognised by trial.

Such a module projects rows to heads, norms the heads of queries and keys or does not, rotates them or does not, calls
attention, and projects its result. A trial gives a copy of the module parts that return random numbers in place of its
layers and norms, and follows these numbers to attention and to the result.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from quire.models.hosted.interface import HostedMask, hosted_by
from quire.models.hosted.linear import is_packable
from quire.models.specs.hosted_spec import HostedAttention, HostedHeads
from quire.ops.interface.ops import Rotation

# Names of the arguments that give a module its rows, and their cosines and sines.
ROWS: Final = "hidden_states"
ANGLES: Final = "position_embeddings"
# Arguments that give positions, and a position that is added to them in a trial: heads must not depend on it.
POSITIONS: Final = ("position_ids", "cache_position")
FAR: Final = 1 << 20
# Relative difference of equal values.
TOLERANCE: Final = 1e-5
# Logarithms of the magnitudes of random numbers: from far below to far above all limits that modules set.
LEAST_LOG: Final = -6.0
LOG_RANGE: Final = 15.0


class _PartCall(NamedTuple):
    """A call of a part: its name, its input and its output."""

    name: str
    given: Tensor
    result: Tensor


class _RandomPart(nn.Module):
    """A part of a copied module, which returns random numbers.

    Args:
        name: the part's name.
        width: values of a row that it returns; None for as many as it is given.
        trial: record of its calls.
    """

    def __init__(self, name: str, width: int | None, trial: _HeadsTrial) -> None:
        super().__init__()
        self._name, self._width, self._trial = name, width, trial

    def forward(self, x: Tensor) -> Tensor:
        """Return random numbers for each row."""
        result = self._trial.random(x.shape if self._width is None else (*x.shape[:-1], self._width))
        self._trial.calls.append(_PartCall(self._name, x, result))
        return result


class _HeadsTrial:
    """The calls of a module's parts and of attention in a trial."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.calls: list[_PartCall] = []
        self.heads: list[tuple[Tensor, Tensor, Tensor]] = []
        self.gathered: Tensor | None = None

    def random(self, shape: Sequence[int]) -> Tensor:
        """Return random numbers of many magnitudes."""
        logs = torch.rand(*shape, generator=self._generator) * LOG_RANGE + LEAST_LOG
        return torch.randn(*shape, generator=self._generator) * logs.exp()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Record heads [T, H or K, D]; return random numbers, [1, T, H, W]."""
        del module, mask, options  # the steps of the examination have seen them
        self.heads.append((query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)))
        self.gathered = self.random((1, query.shape[2], query.shape[1], value.shape[-1]))
        return self.gathered

    def make_mask(self, arguments: dict[str, Any]) -> HostedMask:
        """Return a mask that says nothing."""
        del arguments
        return HostedMask()

    def source(self, values: Tensor, rotation: Rotation | None = None) -> _PartCall | None:
        """Return the call whose result has given values in their order, rotated by `rotation` if there is one."""
        for call in self.calls:
            if call.result.numel() == values.numel():
                result = call.result.reshape(values.shape)
                if _is_close(result if rotation is None else _turned(result, rotation), values):
                    return call
        return None


def recognise_heads(module: nn.Module, attention: HostedAttention, given: Mapping[str, Any]) -> HostedHeads | None:
    """Return how a module computes heads, if a backend's attention computes the same; else None.

    Args:
        module: module of transformers that calls attention.
        attention: its call.
        given: named arguments of its forward pass in a step of the examination.
    """
    if attention.sinks or {attention.key_width, attention.value_width} != {attention.head_dim}:
        return None
    rows, angles = given.get(ROWS), given.get(ANGLES)
    if not isinstance(rows, Tensor) or rows.dim() != 3:
        return None
    if angles is not None and not _are_whole(angles, rows.shape[1], attention.head_dim):
        return None
    found = {_recognise(module, attention, given, far) for far in (0, FAR)}
    return found.pop() if len(found) == 1 else None


def _are_whole(angles: Any, num_rows: int, head_dim: int) -> bool:
    """Return whether cosines and sines are those of pairs of a head's two halves, all of which are rotated."""
    shape = 1, num_rows, head_dim
    return (
        isinstance(angles, tuple)
        and len(angles) == 2
        and all(isinstance(part, Tensor) and part.shape == shape for part in angles)
        and all(torch.equal(*part.chunk(2, -1)) for part in angles)
    )


def _recognise(module: nn.Module, attention: HostedAttention, given: Mapping[str, Any], far: int) -> HostedHeads | None:
    """Try a module at positions that are moved by `far`."""
    trial = _HeadsTrial()
    arguments = {
        name: value + far if name in POSITIONS and isinstance(value, Tensor) else value for name, value in given.items()
    }
    rows = arguments[ROWS] = trial.random(given[ROWS].shape)
    rotation: Rotation | None = None
    if arguments.get(ANGLES) is not None:
        halves = torch.rand(2, 1, rows.shape[1], attention.head_dim // 2, generator=torch.Generator().manual_seed(1))
        cos, sin = torch.cat((halves, halves), -1).unbind()
        arguments[ANGLES] = cos, sin
        rotation = rotation_of(cos, sin)
    copied: Any = copy.copy(module)
    copied._modules = {
        name: None if part is None else _RandomPart(name, _width_of(part), trial)
        for name, part in module._modules.items()
    }
    try:
        with hosted_by(trial):
            result = copied(**arguments)
    except Exception:  # it uses its parts otherwise
        return None
    if len(trial.heads) != 1 or not isinstance(result, tuple) or any(part is not None for part in result[1:]):
        return None
    if not result or not isinstance(result[0], Tensor):
        return None
    return _follow(trial, rows, rotation, result)


def _follow(trial: _HeadsTrial, rows: Tensor, rotation: Rotation | None, result: tuple[Any, ...]) -> HostedHeads | None:
    """Follow the numbers of a trial from the rows to the result."""
    output = trial.source(result[0])
    if output is None or trial.gathered is None or not _is_close(output.given, trial.gathered.flatten(2)):
        return None
    query, key, value = trial.heads[0]
    if trial.source(query) is not None:
        rotation = None
    sources = [trial.source(query, rotation), trial.source(key, rotation), trial.source(value)]
    norms = tuple(source.name for source in sources[:2] if source is not None and source.given is not rows)
    if norms:
        # Each head has a norm of its own.
        sources[:2] = [
            trial.source(source.given) if source is not None and source.given.shape[-1] == query.shape[-1] else None
            for source in sources[:2]
        ]
    names = tuple(source.name for source in sources if source is not None and source.given is rows)
    if len(names) != 3 or len(norms) not in (0, 2) or output.name in names:
        return None
    return HostedHeads(names, output.name, norms, rotation is not None, len(result))


def _width_of(part: nn.Module) -> int | None:
    """Return the outputs of a linear layer; None for other parts."""
    if not is_packable(part):
        return None
    made: Any = part
    return int(made.out_features if isinstance(part, nn.Linear) else made.nf)


def rotation_of(cos: Tensor, sin: Tensor) -> Rotation:
    """Return the rotation by cosines and sines [1, T, D] as modules of transformers have them, with equal halves."""
    first, second = sin[0].chunk(2, -1)
    return Rotation(cos[0, :, None].contiguous(), torch.cat((-first, second), -1)[:, None])


def _turned(heads: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads [T, H, D]."""
    return heads * rotation.cos + heads.roll(heads.shape[-1] // 2, -1) * rotation.sin


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(
        one, other, TOLERANCE, TOLERANCE * float(other.abs().max()) if other.numel() else 0.0
    )
