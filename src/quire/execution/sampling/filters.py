"""Filters that look at a whole distribution: typical sampling and top-n-sigma."""

from __future__ import annotations

import torch

from quire.execution.sampling.rows import ascending_order, row_sums


def apply_top_n_sigma(logits: torch.Tensor, num_sigmas: torch.Tensor) -> None:
    """Forbid tokens that are further below the best one than some standard deviations of the logits.

    Temperature scales logits and deviation alike, so their order does not matter. Forbidden tokens do not count.

    Source: top-n-sigma, arXiv 2411.07641.
    """
    is_open = logits.isfinite()
    count = is_open.sum(-1, keepdim=True)
    mean = row_sums(logits.where(is_open, 0.0)) / count
    squares = (logits - mean).where(is_open, 0.0).square()
    sigma = (row_sums(squares) / count).sqrt()
    edge = logits.amax(-1, keepdim=True) - num_sigmas[:, None] * sigma
    logits.masked_fill_(logits < edge, -torch.inf)


def apply_typical_p(logits: torch.Tensor, typical_p: torch.Tensor) -> None:
    """Forbid tokens whose surprise is far from the entropy: the nearest ones are kept until their probability reaches
    `typical_p`. The lower token id comes first among equally near ones.

    Source: locally typical sampling, arXiv 2202.00666.
    """
    surprise = -logits.double().log_softmax(-1)
    shares = (-surprise).exp()
    entropy = row_sums((shares * surprise).where(shares > 0, 0.0))
    order = ascending_order((surprise - entropy).abs())
    reached = shares.gather(-1, order).cumsum(-1)
    # A token is kept if the mass of nearer tokens is less than typical_p; so the nearest always is.
    is_kept = reached - shares.gather(-1, order) < typical_p[:, None]
    logits.masked_fill_(~torch.zeros_like(is_kept).scatter_(-1, order, is_kept), -torch.inf)
