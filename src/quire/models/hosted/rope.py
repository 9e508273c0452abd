"""Rotations that do not depend on the other sequences of a step."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

# Kinds of rotation whose frequencies transformers computes anew for the longest position of each forward pass.
LONG: Final = "longrope"
DEPEND_ON_LENGTH: Final = ("dynamic", LONG)


class _FixedLengthRope(nn.Module):
    """A rotary embedding as it is in a context of a fixed length.

    Cached keys would be wrong as soon as their sequence, or another one of the step, became longer than the original
    context: the longest context that is served decides, as for families (`LongRopeScaling`).

    Args:
        rope: rotary embedding, called with hidden states and positions [1, T].
        length: length of the context, in tokens.
    """

    def __init__(self, rope: nn.Module, length: int) -> None:
        super().__init__()
        self._rope, self._last = rope, length - 1

    def forward(self, x: Tensor, position_ids: Tensor, *others: Any, **options: Any) -> Any:
        """Return what the embedding returns for the positions."""
        last = position_ids.new_full((len(position_ids), 1), self._last)
        turned = self._rope(x, torch.cat((position_ids, last), 1), *others, **options)
        return turned[:, :-1] if isinstance(turned, Tensor) else tuple(part[:, :-1] for part in turned)


def fix_length(module: nn.Module, length: int) -> None:
    """Make the rotary embeddings of a model those of contexts of `length` tokens."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            if any(kind in DEPEND_ON_LENGTH for kind in _kinds(child)):
                part._modules[name] = _FixedLengthRope(child, length)


def original_length(module: nn.Module) -> int | None:
    """Return the context from which a model with LongRoPE rotates by its long factors; None for other models."""
    lengths = []
    for part in module.modules():
        if LONG in _kinds(part):
            parameters: Any = getattr(part.config, "rope_parameters", None) or {}
            for each in (parameters, *parameters.values()):
                found = each.get("original_max_position_embeddings") if isinstance(each, dict) else None
                lengths += [int(found)] if found else []
    return min(lengths, default=None)


def _kinds(module: nn.Module) -> tuple[str, ...]:
    """Return the kinds of rotation of a module; none if it is no rotary embedding."""
    kinds = getattr(module, "rope_type", ())
    return tuple(kinds.values()) if isinstance(kinds, dict) else (kinds,) if isinstance(kinds, str) else ()
