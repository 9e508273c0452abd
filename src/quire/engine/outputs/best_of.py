"""Selects the best of several samples, by the mean log probability of their tokens."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from quire.engine.outputs.outputs import CompletionOutput


class BestOf:
    """Holds the samples of a request back until all have ended."""

    __slots__ = ("_num_best", "_samples")

    def __init__(self, num_best: int) -> None:
        self._num_best = num_best
        self._samples: dict[int, CompletionOutput] = {}

    def add(self, deltas: Iterable[CompletionOutput]) -> None:
        """Merge the deltas of some samples."""
        for output in deltas:
            known = self._samples.get(output.index)
            if known is None:
                self._samples[output.index] = output
            else:
                known.add(output)

    def best(self) -> tuple[list[CompletionOutput], int]:
        """Return the samples with the highest mean log probability, best first, and the token count of the others."""
        ranked = sorted(self._samples.values(), key=lambda sample: (-_mean_logprob(sample), sample.index))
        best, others = ranked[: self._num_best], ranked[self._num_best :]
        return [replace(sample, index=idx) for idx, sample in enumerate(best)], sum(len(o.token_ids) for o in others)


def _mean_logprob(sample: CompletionOutput) -> float:
    # A sample without tokens ranks last.
    if sample.cumulative_logprob is None or not sample.token_ids:
        return -inf
    return sample.cumulative_logprob / len(sample.token_ids)
