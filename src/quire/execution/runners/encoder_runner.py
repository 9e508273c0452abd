"""The runner of encoders: each text is computed whole in one step, and gives a pooled result; there is no KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from quire.execution.step.pooling import RunningPool, pooled_result, pooled_values
from quire.memory.results import MemoryOps
from quire.models.modules.encoder import Encoder, TextRows
from quire.scheduling.plan import StepPlan, StepResult
from quire.sequences.pooling import Pooling


class EncoderRunner:
    """Turns a plan into results with an encoder.

    Args:
        encoder: the model.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def measure_copies(self) -> None:
        """Return None: there is no host tier."""

    def move(self, ops: MemoryOps) -> None:
        """Do nothing: no block holds anything."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step.

        Args:
            plan: plan whose items are whole pooled prompts, so that each has a `new_sequence`.
        """
        poolings = [item.new_sequence.pooling for item in plan.items if item.new_sequence is not None]
        pooled = [each for each in poolings if each is not None]
        assert len(pooled) == len(plan.items), "an encoder computes whole pooled prompts"
        tokens = chain.from_iterable(item.token_ids for item in plan.items)
        row_starts = list(accumulate((len(item.token_ids) for item in plan.items), initial=0))
        input_ids = torch.tensor(list(tokens), device=self._encoder.device)
        rows = TextRows(input_ids, row_starts, [each.second_start for each in pooled])
        values = self._pool(self._encoder(rows), row_starts, pooled)
        results = (pooled_result(item.seq_id, each) for item, each in zip(plan.items, values, strict=True))
        return StepResult(plan.tick, tuple(results))

    def _pool(self, hidden: Tensor, row_starts: Sequence[int], poolings: Sequence[Pooling]) -> list[list[float]]:
        """Return the result of each text from the hidden states of all rows, [T, E]."""
        heads, states = self._encoder.heads, []
        for pooling, (start, end) in zip(poolings, pairwise(row_starts), strict=True):
            kind = pooling.kind
            if kind == "classify" and heads.classifier is not None:
                kind = heads.classifier.pooling
            pool = RunningPool(kind, pooling.first)
            pool.add(hidden[start:end])
            states.append(pool.result())
        return pooled_values(states, poolings, heads)
