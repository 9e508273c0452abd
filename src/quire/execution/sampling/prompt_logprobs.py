"""The log probabilities of a prompt's tokens, in the result of an item that computes them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.execution.sampling.logprobs import measure, rows_per_tile
from quire.execution.sampling.row_sampling import BAD_LOGITS
from quire.models.modules.causal_model import CausalModel
from quire.scheduling.plan import ItemResult, TokenLogprobs


def with_prompt_logprobs(
    result: ItemResult, targets: tuple[Sequence[int], int], hidden: Tensor, decoder: CausalModel
) -> ItemResult:
    """Add the log probabilities of the prompt's tokens, if the request wants them.

    They are measured a few rows at a time: the logits of a whole prompt would be larger than the model.

    Args:
        result: result of the item so far.
        targets: see `Sampler.prompt_targets`.
        hidden: hidden states, the item's own from row 0 on, [at least len, E].
        decoder: the model.
    """
    token_ids, count = targets
    if not token_ids or result.error is not None:
        return result
    measures: list[TokenLogprobs] = []
    tile = rows_per_tile(decoder.spec.vocab_size)
    for start in range(0, len(token_ids), tile):
        part = token_ids[start : start + tile]
        logits = decoder.logits(hidden[start : start + len(part)])
        if not logits.amax(-1).isfinite().all():
            return ItemResult(result.seq_id, (), error=BAD_LOGITS)
        measures += measure(logits, part, [count] * len(part))
    return result._replace(prompt_logprobs=tuple(measures))
