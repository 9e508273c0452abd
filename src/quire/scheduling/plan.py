"""The two frozen values that cross the torch line: `StepPlan` goes down, `StepResult` comes up.

They are named tuples: immutable, comparable, picklable, and the cheapest immutable value that Python builds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

from quire.memory.results import MemoryOps, TableDelta
from quire.sequences.beams import Candidate
from quire.sequences.logprobs import TokenLogprobs
from quire.sequences.media import Media
from quire.sequences.params import SamplingParams

__all__ = [
    "BeamGroup",
    "Candidate",
    "ItemResult",
    "MemoryOps",
    "NewSequence",
    "ScheduledSequence",
    "StepPlan",
    "StepResult",
    "TableDelta",
    "TokenLogprobs",
]


class NewSequence(NamedTuple):
    """What the data plane must know of a sequence that it has not seen, or has closed.

    Args:
        params: the request's sampling parameters.
        seed: the seed of this sequence's draws; with `sample_idx` and the position it fixes each draw.
        sample_idx: which of the request's `n` samples this sequence is.
        num_prompt: tokens of `token_ids` that are the prompt.
        token_ids: prompt and output so far, all that is known at the time of the plan.
        suppressed_ids: tokens that may not be sampled before `params.min_tokens` output tokens exist.
        media: embeddings to compute in place of some tokens' own, in the order of their places.
        bad_words: token sequences that the output may not contain.
        dry_breakers: tokens across which nothing counts as repeated.
    """

    params: SamplingParams
    seed: int
    sample_idx: int
    num_prompt: int
    token_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...]
    media: tuple[Media, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step.

    ```
     tokens   |<-- computed: [0, start) -->|<-- token_ids: this step -->|
    ```

    Args:
        seq_id: the sequence.
        start: tokens whose KV is stored already; the position of `token_ids[0]`.
        token_ids: the tokens to compute in this step, at positions `start, start + 1, ...`; never empty.
        table_deltas: changes of the block tables since the last plan that named the sequence; from block 0
            when `new_sequence` is given. After them the tables hold slots for `start + len(token_ids)` tokens at least.
        num_samples: tokens to draw from the logits of the last token; 0 in a prefill chunk that is not the last.
            Draw `i` uses `sample_idx + i`.
        new_sequence: given when the data plane does not know the sequence (new, forked or resumed).
        num_draft: the last so many of `token_ids` are drafts, or each `UNKNOWN` where the data plane has a model that
            makes them. A token is drawn at each of them too, and at the token
            before them; the first that differs from the draft behind it ends the run. Then `num_samples` is 1.
    """

    seq_id: int
    start: int
    token_ids: Sequence[int]
    table_deltas: tuple[TableDelta, ...]
    num_samples: int
    new_sequence: NewSequence | None
    num_draft: int = 0


class BeamGroup(NamedTuple):
    """The beams of one search that advance in a step: their items give no tokens, but candidates, all together.

    Args:
        seq_ids: of their items; a prompt's alone in its last step.
        scores: sums of log probabilities of their outputs.
        num_candidates: how many of the best continuations of all of them are wanted.
    """

    seq_ids: tuple[int, ...]
    scores: tuple[float, ...]
    num_candidates: int


class StepPlan(NamedTuple):
    """One engine iteration's decision.

    Args:
        tick: the iteration's number, rising by one.
        items: who runs, in policy order; a sequence appears at most once.
        ops: copies (and later transfers) to perform, in order, before this step's kernels.
        finished_ids: sequences that the data plane forgets before it looks at `items`: finished, aborted or preempted.
        beams: which items belong together.
    """

    tick: int
    items: tuple[ScheduledSequence, ...]
    ops: MemoryOps
    finished_ids: tuple[int, ...]
    beams: tuple[BeamGroup, ...] = ()


class ItemResult(NamedTuple):
    """What one item of the plan gave.

    Args:
        seq_id: the sequence.
        token_ids: of a beam nothing; of several samples, a token for each; of one, a run of tokens that follow each
            other: the drafts that were accepted, the token drawn behind them, and, unless `params.measures_tokens`,
            what is certain to follow.
        logprobs: one for each of them when `params.measures_tokens`, else empty.
        prompt_logprobs: when `params.prompt_logprobs` is set: for each prompt position `p` in
            `[start + 1, min(start + len + 1, num_prompt))`, the log probabilities of the prompt's token at `p`.
        error: why this item alone failed (for example non-finite logits), else None; then the rest is empty.
        draft: the drafts that were verified, where the data plane made them.
        is_own_fault: True when what its request asked for is to blame.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    draft: tuple[int, ...] = ()
    is_own_fault: bool = False


def plain_results(seq_ids: Iterable[int], token_ids: Iterable[tuple[int, ...]]) -> list[ItemResult]:
    """Make the results of many items that gave tokens and nothing else, without a call in Python for each."""
    fields = zip(seq_ids, token_ids, repeat(()), repeat(()), repeat(None), repeat(()), repeat(False), strict=False)
    return list(map(partial(tuple.__new__, ItemResult), fields))


class StepResult(NamedTuple):
    """What a step gave.

    Args:
        tick: the plan's.
        items: a result for each item, in the plan's order.
        beams: for each of the plan's groups the candidates, best first: those that are possible at all, and none where
            an item of the group failed.
    """

    tick: int
    items: tuple[ItemResult, ...]
    beams: tuple[tuple[Candidate, ...], ...] = ()
