"""Operations on rows between the matmuls, and on rows of logits, by torch operators."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire.ops.interface.ops import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT, Activation

# Bytes of logits that are masked at once, so that they are still in a cache when they are added to.
CACHED_BYTES = 2 << 20


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of [..., D]; the scale is applied separately, after the cast to its dtype."""
    return torch.rms_norm(x.to(weight.dtype), (x.shape[-1],), None, eps).mul_(weight).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head of [T, H, D]: add the swapped halves, times the sines."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    """Activate the gates, then multiply in place."""
    gates, ups = gate_up.chunk(2, -1)
    if activation == "swigluoai":
        gates = gates.clamp(max=SWIGLUOAI_LIMIT)
        activated = torch.sigmoid(gates * SWIGLUOAI_ALPHA).mul_(gates)
        return activated.mul_(ups.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT).add_(1.0))
    activated = functional.silu(gates) if activation == "silu" else functional.gelu(gates, approximate="tanh")
    return activated.mul_(ups)


def gated_norm(x: Tensor, gates: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gate [T, F], then normalise and scale each of the G parts of a row; `weight` is [G, F / G]."""
    parts = functional.silu(gates.float()).mul_(x).reshape(len(x), *weight.shape)
    return rms_norm(parts, weight, eps).flatten(1).to(gates.dtype)


def apply_token_bitmask(logits: Tensor, rows: Sequence[int], masks: Sequence[Tensor]) -> None:
    """Forbid tokens whose bits are not set, in some rows of logits [R, V]; see `Ops.apply_token_bitmask`."""
    if not rows:
        return
    num_tokens, device = logits.shape[1], logits.device
    # Addends of eight tokens' bits: a look-up and a sum are much faster than a fill under a mask.
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    added = torch.zeros(256, 8).masked_fill_(bits == 0, -torch.inf).to(device)
    tile = max(1, CACHED_BYTES // (4 * num_tokens))
    for start in range(0, len(rows), tile):
        part = slice(start, start + tile)
        octets = torch.stack(list(masks[part])).to(device).view(torch.uint8)
        change = added.index_select(0, octets.flatten().int()).view(len(octets), -1)[:, :num_tokens]
        logits.index_add_(0, torch.tensor(rows[part], device=device), change)
