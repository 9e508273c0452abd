"""Measures of quality: divergence of probabilities from exact ones, and agreement of greedy outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Comparison of the probabilities of the next token with exact ones, over all positions of a text.

    Args:
        num_positions: number of positions.
        kl_mean, kl_median, kl_p99, kl_max: KL divergence of the exact probabilities from the measured ones, over the
            whole vocabulary, in nats.
        perplexity, exact_perplexity: e to the power of the mean negative log probability of the text's tokens.
        same_best: share of positions with the same likeliest token.
    """

    num_positions: int
    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    perplexity: float
    exact_perplexity: float
    same_best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyAgreement:
    """Comparison of greedy outputs with exact ones.

    Args:
        num_prompts: number of prompts.
        num_tokens: number of tokens of each output.
        num_equal: number of outputs that are equal.
        mean_equal_tokens: mean number of tokens before the first different one; the whole length for equal outputs.
    """

    num_prompts: int
    num_tokens: int
    num_equal: int
    mean_equal_tokens: float

    @classmethod
    def of(cls, outputs: Sequence[Sequence[int]], exact: Sequence[Sequence[int]]) -> GreedyAgreement:
        """Compare outputs of equal lengths."""
        equal = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))
            for ours, theirs in zip(outputs, exact, strict=True)
        ]
        length = len(exact[0])
        return cls(
            num_prompts=len(exact),
            num_tokens=length,
            num_equal=equal.count(length),
            mean_equal_tokens=sum(equal) / len(equal),
        )


class DivergenceTally:
    """Accumulates the comparison of probabilities over the positions of a text."""

    def __init__(self) -> None:
        self._divergences: list[Tensor] = []
        self._log_probs: list[Tensor] = []
        self._exact_log_probs: list[Tensor] = []
        self._num_same = 0

    def add(self, logits: Tensor, exact: Tensor, targets: Tensor) -> None:
        """Add R positions: logits and exact logits [R, V], and the next tokens [R]."""
        self._num_same += int((logits.argmax(-1) == exact.argmax(-1)).sum())
        actual, expected = logits.log_softmax(-1), exact.log_softmax(-1)
        for log_probs, kept in ((actual, self._log_probs), (expected, self._exact_log_probs)):
            kept.append(log_probs.gather(1, targets[:, None]).squeeze(1).double())
        # A token with an exact probability of 0 contributes nothing.
        summands = (expected - actual).mul_(expected.exp()).masked_fill_(expected.isneginf(), 0.0)
        self._divergences.append(summands.sum(-1, dtype=torch.float64))

    def result(self) -> Divergence:
        """Return the comparison over all positions so far."""
        divergences = torch.cat(self._divergences)
        perplexity, exact = (
            torch.cat(log_probs).mean().neg().exp().item() for log_probs in (self._log_probs, self._exact_log_probs)
        )
        return Divergence(
            num_positions=len(divergences),
            kl_mean=divergences.mean().item(),
            kl_median=divergences.median().item(),
            kl_p99=divergences.quantile(0.99).item(),
            kl_max=divergences.max().item(),
            perplexity=perplexity,
            exact_perplexity=exact,
            same_best=self._num_same / len(divergences),
        )


def report_lines(divergence: Divergence, greedy: GreedyAgreement | None) -> list[str]:
    """Return the results as lines of text."""
    lines = [
        f"positions        {divergence.num_positions:,}",
        f"KL divergence    mean {divergence.kl_mean:.5f}, median {divergence.kl_median:.5f}, 99th percentile "
        f"{divergence.kl_p99:.5f}, largest {divergence.kl_max:.4f} nats",
        f"perplexity       {divergence.perplexity:.4f}, exact {divergence.exact_perplexity:.4f}",
        f"same best token  {divergence.same_best:.2%}",
    ]
    if greedy is not None:
        lines.append(
            f"greedy           {greedy.num_equal} of {greedy.num_prompts} outputs of {greedy.num_tokens} tokens are "
            f"the exact ones; the first {greedy.mean_equal_tokens:.1f} tokens on average"
        )
    return lines
