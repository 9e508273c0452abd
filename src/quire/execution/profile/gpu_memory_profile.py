"""Peak memory of a step on a GPU, measured by running the largest one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from quire.config import StepCost
from quire.distributed.rank_group import RankGroup
from quire.execution.runners.build import build_runner
from quire.execution.runners.runner import ModelRunner
from quire.memory.results import NO_OPS
from quire.models.modules.causal_model import CausalModel
from quire.scheduling.plan import NewSequence, ScheduledSequence, StepPlan, TableDelta
from quire.sequences.params import SamplingParams

# All options that take memory per sampled row: filters that sort the vocabulary, penalties, log probabilities.
HUNGRY = SamplingParams(top_p=0.9, top_k=50, typical_p=0.9, presence_penalty=0.1, logprobs=5, seed=0)
# The same for rows that are sampled on the GPU only: they sort the vocabulary, and count tokens on the GPU.
SORTING = replace(HUNGRY, top_k=0, typical_p=1.0)
# Total number of cached tokens in each of the two decode steps that are compared.
CONTEXTS = (1 << 13, 1 << 15)


class StepLimits(NamedTuple):
    """The largest step.

    Args:
        max_num_seqs: maximum number of sequences.
        max_num_batched_tokens: maximum number of computed tokens.
        max_model_len: maximum number of tokens of a sequence.
        block_size: N.
        num_draft_tokens: number of drafts of a sequence.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_draft_tokens: int = 0


# (start, tokens) of each sequence in a step.
Items = list[tuple[int, int]]


def measure_step_cost(
    decoder: CausalModel,
    limits: StepLimits,
    dtype: torch.dtype,
    stored: str | None = None,
    draft: CausalModel | None = None,
) -> StepCost:
    """Run the largest steps on a GPU, and return their peak memory in addition to weights and KV cache.

    Args:
        decoder: decoder on a GPU, with all its weights.
        limits: limits of steps.
        dtype: dtype of the weights.
        stored: see `KVStorage`.
        draft: model for drafts that runs in the same steps; None for none.
    """

    def peak_bytes(items: Items) -> int:
        return max(_peak_bytes(decoder, limits, dtype, stored, draft, items, params) for params in (HUNGRY, SORTING))

    return step_cost(limits, peak_bytes)


def step_cost(limits: StepLimits, peak_bytes: Callable[[Items], int]) -> StepCost:
    """Return the memory of the largest steps: bytes per cached token, and a fixed part."""
    prefill = peak_bytes(prefill_items(limits))
    few, many = (decode_items(limits, count) for count in CONTEXTS)
    few_bytes, many_bytes = peak_bytes(few), peak_bytes(many)
    more = _num_cached(many) - _num_cached(few)
    slope = max(0, -(-(many_bytes - few_bytes) // more)) if more else 0
    return StepCost(fixed_bytes=max(prefill, many_bytes - slope * _num_cached(many), 0), bytes_per_token=slope)


def prefill_items(limits: StepLimits) -> Items:
    """Return (start, tokens) of each sequence in a step of prompts, each as long as it can be."""
    budget, longest = limits.max_num_batched_tokens, limits.max_model_len
    cuts = [*range(0, budget, longest), budget][: limits.max_num_seqs + 1]
    return [(0, end - start) for start, end in pairwise(cuts)]


def decode_items(limits: StepLimits, num_cached: int) -> Items:
    """Return (start, tokens) of each sequence in a step of decodes with about a given number of cached tokens.

    With drafts, each sequence has one token and as many drafts as the limits allow.
    """
    most = limits.max_num_batched_tokens // limits.max_num_seqs - 1
    count = 1 + max(0, min(limits.num_draft_tokens, most, limits.max_model_len - 2))
    start = min(limits.max_model_len - count, max(1, num_cached // limits.max_num_seqs))
    return [(start, count)] * limits.max_num_seqs


def _num_cached(items: Items) -> int:
    return sum(start + count for start, count in items)


def plan_of(items: Items, limits: StepLimits, num_groups: int, params: SamplingParams = HUNGRY) -> StepPlan:
    """Return a plan of sequences whose blocks are all block 1: only the sizes of its tensors have a meaning."""
    return StepPlan(0, tuple(_plan_items(items, limits, num_groups, params)), NO_OPS, ())


def _plan_items(
    items: Items, limits: StepLimits, num_groups: int, params: SamplingParams
) -> Iterator[ScheduledSequence]:
    for seq_id, (start, count) in enumerate(items):
        table = (1,) * -(-(start + count) // limits.block_size)
        deltas = tuple(TableDelta(group_idx, 0, table) for group_idx in range(num_groups))
        # Rows that depend on the tokens before them are sampled one after the other, which takes less memory.
        num_draft = count - 1 if start else 0
        own = replace(params, presence_penalty=0.0) if num_draft else params
        new_sequence = NewSequence(own, 0, 0, start + count, (0,) * (start + count), ())
        yield ScheduledSequence(seq_id, start, (0,) * count, deltas, 1, new_sequence, num_draft)


def run_alone(runner: ModelRunner, plan: StepPlan, ranks: RankGroup | None) -> None:
    """Run a step that no scheduler has planned; all ranks that share the model run it."""
    with nullcontext() if ranks is None else ranks.watched():
        runner.execute(plan)
    if ranks is not None:
        ranks.end_round()


def _peak_bytes(
    decoder: CausalModel,
    limits: StepLimits,
    dtype: torch.dtype,
    stored: str | None,
    draft: CausalModel | None,
    items: Items,
    params: SamplingParams,
) -> int:
    """Run one step over two blocks of KV memory, and return its peak memory beyond these."""
    device = torch.device("cuda")
    num_groups = sum(len(each.cache_groups) for each in (decoder, draft) if each)
    num_blocks = [2] * num_groups
    runner = build_runner(
        decoder,
        num_blocks=num_blocks,
        block_size=limits.block_size,
        device="cuda",
        dtype=dtype,
        stored=stored,
        draft=draft,
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run_alone(runner, plan_of(items, limits, num_groups, params), decoder.ranks)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    del runner
    torch.cuda.empty_cache()
    return peak
