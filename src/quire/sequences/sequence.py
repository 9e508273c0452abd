"""Requests and their sequences: one token stream for each sample or beam."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from quire.errors import InvariantViolation
from quire.memory.prefix.token_chain import Namespace, TokenChain
from quire.memory.results import HitEnd, PrefixHit, TokenAccount
from quire.sequences.beams import BeamSearch
from quire.sequences.media import Media
from quire.sequences.params import SamplingParams
from quire.sequences.pooling import Pooling
from quire.sequences.status import TRANSITIONS, FinishReason, SequenceStatus
from quire.sequences.strategy import Append, Strategy


class Sequence:
    """One token stream.

    ```
     tokens   |<-- prompt -->|<-- output -->|
              |<-- num_computed -->|<-- num_pending -->|
    ```

    Args:
        seq_id: id, unique in the engine.
        request: request that owns the sequence.
        sample_idx: index among the request's sequences.
        tokens: prompt and output; owned here, referenced by `chain`.
        chain: token chain, which identifies its blocks.
        key: sort key in every queue.
        strategy: decoding strategy of the request.
        default_edit: edit that the strategy always returns for a single token that does not end the sequence; None if
            the strategy must be called for each token.

    Attributes:
        num_computed: number of tokens whose KV is stored.
        draft: drafts that the planned step verifies.
        num_drafted, num_accepted: numbers of verified and of accepted drafts so far.
        is_open: True if the data plane knows the sequence.
        is_staged: True once the prompt's blocks on disk are loaded, or loading them was rejected as too slow.
        staged: positions in the chain of the blocks that were loaded.
        num_prompt: number of prompt tokens.
        max_tokens: number of tokens, prompt included, at which the sequence ends.
        end_ids: tokens that end the sequence once it has `min_tokens` of output; see `Request.end_ids`.
    """

    __slots__ = (
        "chain",
        "default_edit",
        "draft",
        "end_ids",
        "finish_reason",
        "is_open",
        "is_staged",
        "key",
        "max_tokens",
        "num_accepted",
        "num_computed",
        "num_drafted",
        "num_prompt",
        "request",
        "sample_idx",
        "seq_id",
        "staged",
        "status",
        "stop_reason",
        "strategy",
        "tokens",
    )

    def __init__(
        self,
        seq_id: int,
        request: Request,
        sample_idx: int,
        tokens: list[int],
        chain: TokenChain,
        key: tuple[int, int, int],
        strategy: Strategy[Sequence],
        default_edit: Append | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.sample_idx = sample_idx
        self.tokens = tokens
        self.chain = chain
        self.key = key
        self.strategy = strategy
        self.default_edit = default_edit
        self.num_prompt = request.num_prompt
        self.max_tokens = request.max_total_tokens
        self.end_ids = request.end_ids
        self.num_computed = 0
        self.draft: tuple[int, ...] = ()
        self.num_drafted = 0
        self.num_accepted = 0
        self.is_open = False
        self.is_staged = False
        self.staged: set[int] = set()
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def is_beam(self) -> bool:
        """True for a beam of a search; the beams of a search are scheduled, preempted and resumed together."""
        return self.request.search is not None and len(self.tokens) > self.num_prompt

    @property
    def is_finished(self) -> bool:
        """True once the sequence has ended."""
        return self.status is SequenceStatus.FINISHED

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status.

        Raises:
            InvariantViolation: S5, the change is not allowed.
        """
        if status not in TRANSITIONS[self.status]:
            raise InvariantViolation(
                "S5", f"sequence {self.seq_id} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with its parameters and sequences.

    Args:
        request_id: id given by the caller.
        prompt_token_ids: tokens of the prompt; never empty.
        params: valid sampling parameters.
        max_total_tokens: maximum number of tokens of prompt and output, from the context length and `max_tokens`.
        end_token_ids: tokens that end a sequence: the model's own, unless `ignore_eos`.
        arrival: number that increases with each request; the order under the policy "fcfs".
        priority: priority level; lower values run first under the policy "priority".
        flow: name of a group of requests that alternate with other requests, for example all requests of a tenant.
        namespace: namespace in which its blocks may be shared.
        source_namespace: namespace of its blocks at another engine, if `namespace` is its own alone; None if they are
            the same.
        media: media of the prompt, in the order of their positions.
        retain_cache: True to evict its published blocks last.
        bad_words: token sequences that its outputs may not contain.
        dry_breakers: tokens that end a repetition for the DRY penalty.
        grammar: compiled grammar of `structured_outputs`; kept alive for the data plane.
        pooling: kind of result of a pooled request; None to generate.
        adapter: slot of its adapter in the data plane; None for the model alone.
        seed: seed of its random draws.
        drawn_from: number of tokens of a sequence from which on the device samples its next token without the host; see
            `PlansAhead`.
        ahead_from: number of tokens of a sequence from which on a step with its next token may be planned before that
            token is read.
        sequences: the prompt's sequence; after the fork, one per sample. For a beam search indexed by `sample_idx`,
            including dropped beams.
        search: state of a beam search; None for samples.
        num_known_prompt_logprobs: number of prompt positions whose log probabilities are known.
        account: sources of the prompt's KV at the first admission, and the reasons why the rest was computed, as far
            as the client may know; None before admission.
        num_cached_tokens: number of prompt tokens found in the prefix cache at the first admission; None before.
        num_disk_tokens: number of the cached tokens whose blocks were loaded from disk.
        hit_end: reason why the prefix hit ended; None before the first admission.
        differs_at: see `PrefixHit.differs_at`.
        num_preemptions: number of times that one of its sequences was preempted.
        order_key: position in the scheduler's order; requests with smaller keys come first.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    end_token_ids: frozenset[int]
    arrival: int
    seed: int
    priority: int = 0
    flow: str | None = None
    namespace: Namespace = field(default_factory=Namespace)
    source_namespace: Namespace | None = None
    media: tuple[Media, ...] = ()
    retain_cache: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()
    grammar: object = None
    pooling: Pooling | None = None
    adapter: int | None = None
    drawn_from: float = inf
    ahead_from: float = inf
    sequences: list[Sequence] = field(default_factory=list)
    search: BeamSearch | None = None
    num_known_prompt_logprobs: int = 0
    account: TokenAccount | None = None
    num_cached_tokens: int | None = None
    num_disk_tokens: int = 0
    hit_end: HitEnd | None = None
    differs_at: int | None = None
    num_preemptions: int = 0
    order_key: tuple[int, int] = (0, 0)

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.prompt_token_ids)

    def record_hit(self, hit: PrefixHit, account: TokenAccount) -> None:
        """Record the prefix hit of the first admission."""
        self.account = account
        self.num_cached_tokens = sum(account.sources) - account.sources.computed
        self.num_disk_tokens = account.sources.disk
        self.hit_end = hit.end
        self.differs_at = hit.differs_at

    @property
    def unfinished(self) -> list[Sequence]:
        """Waiting, running and swapped sequences."""
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def is_forked(self) -> bool:
        """True once each sample has its own sequence."""
        return len(self.sequences) == self.params.num_sequences

    @property
    def is_finished(self) -> bool:
        """True if all sequences have ended; then no further sample can be forked."""
        return bool(self.sequences) and all(sequence.is_finished for sequence in self.sequences)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a sequence with `min_tokens` of output; includes the request's own stop tokens."""
        return self.end_token_ids.union(self.params.stop_token_ids)

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Tokens that may not be sampled before `min_tokens` output tokens exist."""
        if not self.params.min_tokens:
            return ()
        return tuple(sorted(self.end_ids))

    @property
    def least_step(self) -> int:
        """Number of tokens that a step must have room for: those of the largest medium that sees itself, or 1."""
        return max([one.span.num_tokens for one in self.media if one.sees_itself], default=1)

    def whole_media(self, start: int, count: int) -> int:
        """Return how many of `count` tokens from index `start` on end inside no medium that sees itself."""
        end = start + count
        for one in self.media:
            if one.sees_itself and one.span.start < end < one.span.end:
                return max(0, one.span.start - start)
        return count

    @property
    def hit_limit(self) -> int | None:
        """Number of prompt tokens that a prefix hit may cover, None for all.

        A hit gives no logits. While prompt log probabilities are missing, it may cover only positions whose next token
        has a known log probability. Some poolings need the hidden states of all tokens.
        """
        if self.pooling is not None and self.pooling.reads_all:
            return 0
        if self.params.prompt_logprobs is None or self.num_known_prompt_logprobs >= self.num_prompt - 1:
            return None
        return self.num_known_prompt_logprobs
