"""Log probabilities of tokens, from the model's raw logits."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from quire.execution.sampling.rows import stable_topk
from quire.scheduling.plan import TokenLogprobs

# Results are written as JSON, which has no infinity.
LOWEST = -9999.0
TILE_BYTES = 32 << 20


def rows_per_tile(vocab_size: int) -> int:
    """Return the number of rows of float32 logits in a tile of bounded size."""
    return max(1, TILE_BYTES // (4 * vocab_size))


def measure(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log probability of one token of each row, and `counts` of the most probable tokens."""
    ids = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logits.gather(1, ids)
    # Row by row; `logsumexp` adds up a single row on several threads, and so differently.
    normed = logits.log_softmax(-1)
    ranks = (1 + torch.count_nonzero(logits > chosen, dim=-1)).tolist()
    logprobs = normed.gather(1, ids).clamp_(min=LOWEST)[:, 0].tolist()
    if not any(counts):
        return [TokenLogprobs(*measured) for measured in zip(token_ids, logprobs, ranks, strict=True)]
    _, top_ids = stable_topk(logits, max(counts))
    top_logprobs = normed.gather(1, top_ids).clamp_(min=LOWEST)
    rows = zip(token_ids, logprobs, ranks, top_ids.tolist(), top_logprobs.tolist(), counts, strict=True)
    return [
        TokenLogprobs(token_id, logprob, rank, array("i", ids[:count]), array("d", values[:count]))
        for token_id, logprob, rank, ids, values, count in rows
    ]
