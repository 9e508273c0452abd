"""The immutable values that cross the torch line: `StepPlan` goes to the data plane, `StepResult` comes back.

They are named tuples: immutable, comparable, picklable, and cheap to construct. Steps of many decoding sequences have
items and results in columns instead: see `quire.scheduling.decode_columns`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from quire.errors import WorkerError
from quire.memory.results import MemoryOps, TableDelta
from quire.sequences.beams import Candidate
from quire.sequences.logprobs import TokenLogprobs
from quire.sequences.media import Media
from quire.sequences.params import SamplingParams
from quire.sequences.pooling import Pooling
from quire.sequences.sequence import Sequence

__all__ = [
    "BeamGroup",
    "Candidate",
    "ItemResult",
    "LaunchedStep",
    "MemoryOps",
    "NewSequence",
    "ScheduledSequence",
    "StepPlan",
    "StepResult",
    "TableDelta",
    "TokenLogprobs",
]


class NewSequence(NamedTuple):
    """Description of a sequence that the data plane does not know yet, or has forgotten.

    Args:
        params: the request's sampling parameters.
        seed: seed of the request's random draws; together with `sample_idx` and the position it determines each draw.
        sample_idx: index of the sample among the request's `n`.
        num_prompt: number of leading `token_ids` that are the prompt.
        token_ids: prompt and output at the time of the plan.
        suppressed_ids: tokens that may not be sampled before `params.min_tokens` output tokens exist.
        media: embeddings that replace the embeddings of some tokens, in the order of their positions.
        bad_words: token sequences that the output may not contain.
        dry_breakers: tokens that end a repetition for the DRY penalty.
        pooling: result to return at the last token of the prompt, instead of tokens; None to sample.
        adapter: slot of the sequence's LoRA adapter; None for the base model.
        arrival: number of the request, which no other request has; None for a sequence without siblings.
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
    pooling: Pooling | None = None
    adapter: int | None = None
    arrival: int | None = None

    @classmethod
    def of(cls, sequence: Sequence) -> NewSequence:
        """Return the description of a sequence as it is."""
        request, tokens = sequence.request, tuple(sequence.tokens)
        fixed = request.suppressed_ids, request.media, request.bad_words, request.dry_breakers, request.pooling
        start = request.params, request.seed, sequence.sample_idx, sequence.num_prompt, tokens
        return cls(*start, *fixed, adapter=request.adapter, arrival=request.arrival)


class ScheduledSequence(NamedTuple):
    """A sequence's part of a step.

    ```
     tokens   |<-- computed: [0, start) -->|<-- token_ids: this step -->|
    ```

    Args:
        seq_id: id of the sequence.
        start: number of tokens whose KV is stored already; the position of `token_ids[0]`.
        token_ids: tokens to compute in this step, at positions `start, start + 1, ...`; never empty. In a step that was
            planned ahead, a single `UNKNOWN` stands for the token that the previous step samples for the sequence.
        table_deltas: changes of the block tables since the last plan that contained the sequence; from block 0 with a
            `new_sequence`. The updated tables have slots for at least `start + len(token_ids)` tokens.
        num_samples: number of tokens to draw from the logits of the last token; 0 in a prefill chunk that is not the
            last. Draw `i` uses `sample_idx + i`.
        new_sequence: description of a sequence that the data plane does not know (new, forked or resumed), else None.
        num_draft: number of draft tokens at the end of `token_ids`; each is `UNKNOWN` if the data plane has a draft
            model. A token is sampled at the position before the drafts and at each draft; the first sampled token that
            differs from the next draft ends the run. `num_samples` is 1 then.
    """

    seq_id: int
    start: int
    token_ids: Seq[int]
    table_deltas: tuple[TableDelta, ...]
    num_samples: int
    new_sequence: NewSequence | None
    num_draft: int = 0


class BeamGroup(NamedTuple):
    """The beams of one search in a step: the result has candidates of the group instead of tokens of its items.

    Args:
        seq_ids: ids of the beams' sequences; the prompt's sequence alone in its last prefill step.
        scores: sum of the log probabilities of each beam's output.
        num_candidates: number of candidates to find among the continuations of all beams.
    """

    seq_ids: tuple[int, ...]
    scores: tuple[float, ...]
    num_candidates: int


class StepPlan(NamedTuple):
    """The scheduler's decision for one step.

    Args:
        tick: number of the step, increasing by one.
        items: scheduled sequences in policy order, a tuple or `DecodeItems`; each sequence appears at most once.
        ops: block copies to perform, in order, before the kernels of this step.
        finished_ids: ids of the sequences to forget before `items` are processed: finished, aborted or preempted ones.
        beams: beam groups among the items.
    """

    tick: int
    items: Seq[ScheduledSequence]
    ops: MemoryOps
    finished_ids: tuple[int, ...]
    beams: tuple[BeamGroup, ...] = ()


class ItemResult(NamedTuple):
    """Result of one item of the plan.

    Args:
        seq_id: id of the sequence.
        token_ids: empty for a beam. With `num_samples` above 1, one token per sample. Otherwise consecutive tokens: the
            accepted drafts, the token drawn after them and, unless `params.measures_tokens`, tokens that the grammar
            forces after that one.
        logprobs: one entry per token when `params.measures_tokens`, else empty.
        prompt_logprobs: when `params.prompt_logprobs` is set: for each prompt position `p` in
            `[start + 1, min(start + len + 1, num_prompt))`, the log probabilities of the prompt's token at `p`.
        error: reason why this item alone failed (for example non-finite logits), else None; the other fields are empty
            then.
        draft: draft tokens that were verified, if the data plane has the draft model.
        is_own_fault: True when the parameters of the request caused the error.
        pooled: result of a pooled sequence, whose last item has no tokens: its hidden state, or logits; see `Pooling`.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    draft: tuple[int, ...] = ()
    is_own_fault: bool = False
    pooled: tuple[float, ...] = ()


class StepResult(NamedTuple):
    """Result of a step.

    Args:
        tick: number of the plan.
        items: result of each item, in the plan's order, a tuple or `DecodeResults`.
        beams: candidates of each beam group, best first, without impossible ones; empty if an item of the group
            failed.
    """

    tick: int
    items: Seq[ItemResult]
    beams: tuple[tuple[Candidate, ...], ...] = ()


class LaunchedStep(NamedTuple):
    """A step that was launched.

    Args:
        result: function that waits for the step and returns its result, called once; it raises the `WorkerError` of a
            step that failed as a whole.
        has_failed: True for a step that could not be launched.
    """

    result: Callable[[], StepResult]
    has_failed: bool = False

    @classmethod
    def failed(cls, error: WorkerError) -> LaunchedStep:
        """Return a step that could not be launched."""

        def result() -> StepResult:
            raise error

        return cls(result, has_failed=True)
