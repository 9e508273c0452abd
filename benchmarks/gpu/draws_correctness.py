"""Sampling by kernels against sampling by torch's operators on the same device."""

from __future__ import annotations

import torch

from quire.execution.sampling.device.device_draws import TorchDraws
from quire.ops.interface.token_draws import FEW, GREEDY, MANY, WHOLE, RowFilters, RowParameters
from quire.ops.triton.triton_ops import TritonOps


def share_of_other_tokens(ops: TritonOps, device: torch.device, vocab_size: int) -> float:
    """Return the share of rows whose token differs; infinity where a row's state differs.

    Rows are of all kinds, and one has no finite logits. A token may differ where the random number is within rounding
    errors of its boundary in the cumulative distribution.
    """
    generator = torch.Generator().manual_seed(1)
    kinds = torch.tensor([GREEDY, WHOLE, FEW, MANY] * 10)
    count, is_few, is_many = len(kinds), kinds == FEW, kinds == MANY
    logits = torch.randn(count, vocab_size, generator=generator) * 3
    logits[7] = float("nan")
    filters = RowFilters(
        torch.rand(count, generator=generator) + 0.3,
        torch.where(is_few, min(20, vocab_size), vocab_size),
        torch.where(is_few | is_many, 0.9, 1.0).double(),
        torch.where(is_many, 1e-3, 0.0),
    )
    greedy, whole, few, many = ((kinds == kind).nonzero()[:, 0].to(device) for kind in (GREEDY, WHOLE, FEW, MANY))
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    parameters = RowParameters(
        kinds.int().to(device),
        greedy,
        whole,
        few,
        many,
        RowFilters(*(each.to(device) for each in filters)),
        seeds.to(device),
        torch.zeros(count, dtype=torch.int64, device=device),
        min(20, vocab_size),
        False,
    )
    positions = torch.arange(count, device=device)
    found, expected = (
        each.draw_tokens(logits.to(device, copy=True), parameters, positions, None) for each in (ops, TorchDraws())
    )
    if not torch.equal(found[1], expected[1]):
        return float("inf")
    is_right = (found[0] == expected[0]) | (found[1] != 0)
    return 1.0 - is_right.float().mean().item()
