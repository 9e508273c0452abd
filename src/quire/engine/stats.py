"""What an engine did and how it is, in numbers."""

from __future__ import annotations

from typing import NamedTuple

from quire.execution.prefix_store import StoreStats
from quire.memory.status import NO_TOKENS, TokenAccount


class StepStats(NamedTuple):
    """The numbers of one step: levels at its end, and counts of what it added.

    Args:
        now_s: when the step ended, in seconds of a monotonic clock.
        num_running: level; sequences that run.
        num_waiting: level; requests that wait, preempted ones included.
        num_swapped: level; sequences whose blocks are on another tier.
        kv_usage: level; share of the KV blocks in use, from 0 to 1.
        host_usage: level; share of the swap space in use, from 0 to 1.
        prefix_queries: count; prompt tokens looked up in the prefix index.
        prefix_hits: count; those of them found there.
        num_preemptions: count; sequences whose memory was taken.
        num_swaps: count; those of them that were swapped out.
        wasted_tokens: count; computed tokens that the others lost.
        swap_out_blocks, swap_in_blocks: count; blocks copied to the host, and back.
        prompt_tokens: count; prompt tokens of the requests that ran for the first time.
        generation_tokens: count; tokens sampled.
        step_tokens: count; tokens computed, prefill and decode together.
        first_time: count; prompt tokens of those requests by source, and the computed ones by reason.
        resumed: count; the same of all tokens of sequences that came back after a preemption.
        num_drafts: count; sequences of which the step verified drafts.
        num_draft_tokens: count; drafts that it verified.
        num_accepted_tokens: count; those of them that were right.
        accepted_by_position: count; the same by the draft's place behind the last token.
    """

    now_s: float
    num_running: int
    num_waiting: int
    num_swapped: int
    kv_usage: float
    host_usage: float
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_swaps: int
    wasted_tokens: int
    swap_out_blocks: int
    swap_in_blocks: int
    prompt_tokens: int
    generation_tokens: int
    step_tokens: int
    first_time: TokenAccount = NO_TOKENS
    resumed: TokenAccount = NO_TOKENS
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()


class Totals(NamedTuple):
    """What is counted since the start and told for each step; see `StepStats`."""

    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    num_swaps: int
    wasted_tokens: int
    swap_out_blocks: int
    swap_in_blocks: int
    prompt_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Health(NamedTuple):
    """Whether the engine makes progress.

    Args:
        is_alive: its thread runs.
        is_stuck: it has work, but has completed no step for a minute.
        seconds_since_progress: since the last step or idle moment.
    """

    is_alive: bool
    is_stuck: bool
    seconds_since_progress: float
    num_running: int
    num_waiting: int
    num_steps: int


class EngineStats(NamedTuple):
    """Totals since the start.

    Args:
        prefix_queries: prompt tokens looked up in the prefix index, at first admission.
        prefix_hits: of those, tokens found.
        resumed_queries: tokens looked up when preempted sequences came back.
        resumed_hits: of those, tokens found.
        num_swaps: of the preemptions, those that swapped a sequence out.
        first_time: prompt tokens by source at first admission, and the computed ones by reason.
        resumed: the same of all tokens of preempted sequences that came back.
        wasted_tokens: computed tokens that sequences lost which were not swapped.
        prompt_tokens: prompt tokens of the requests that were let in.
        generation_tokens: tokens generated.
        computed_tokens: tokens that went through the model.
        disk: of the prefix cache on disk, None without one.
        num_drafts: times that a sequence's drafts were verified.
        num_draft_tokens: drafts that were.
        num_accepted_tokens: of those, drafts that were right.
    """

    num_steps: int
    num_preemptions: int
    num_swaps: int
    prefix_queries: int
    prefix_hits: int
    resumed_queries: int
    resumed_hits: int
    wasted_tokens: int
    prompt_tokens: int
    generation_tokens: int
    computed_tokens: int
    num_copies: int
    num_evictions: int
    num_merges: int
    first_time: TokenAccount = NO_TOKENS
    resumed: TokenAccount = NO_TOKENS
    disk: StoreStats | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
