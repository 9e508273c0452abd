"""A request, and the sequences that it owns: one token stream for each sample or beam."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.errors import InvariantViolation
from quire.memory.prefix.token_chain import Namespace, TokenChain
from quire.memory.results import HitEnd, PrefixHit, TokenAccount
from quire.sequences.beams import BeamSearch
from quire.sequences.media import Media
from quire.sequences.params import SamplingParams
from quire.sequences.status import TRANSITIONS, FinishReason, SequenceStatus
from quire.sequences.strategy import Append, Strategy


class Sequence:
    """One token stream.

    ```
     tokens   |<-- prompt -->|<-- output -->|
              |<-- num_computed -->|<-- num_pending -->|
    ```

    Args:
        seq_id: unique in the engine.
        request: its owner.
        sample_idx: which of the request's samples it is.
        tokens: prompt and output; owned here, referenced by `chain`.
        chain: the identities of its blocks.
        strategy: how its request is decoded.
        default_edit: edit that the strategy always returns for a single token that does not end the sequence; None
            where the strategy must be called for each token.

    Attributes:
        num_computed: tokens whose KV is stored.
        draft: tokens that may come next, which the step that is planned verifies.
        num_drafted, num_accepted: drafts that were verified so far, and those of them that were right.
        is_open: True when the data plane knows the sequence.
        is_staged: True once what is on disk of its prompt was brought up, or found not to be worth that.
        staged: places in its chain of the blocks that were.
        num_prompt: tokens of the prompt.
        max_tokens: number of tokens, prompt included, with which it ends.
        end_ids: tokens that end it once it has `min_tokens` of output; see `Request.end_ids`.
        key: its place in every queue: the smaller, the earlier.
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
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Tokens still to run through the model before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def is_beam(self) -> bool:
        """True for one of the beams of a search, which advance, lose their memory and come back together."""
        return self.request.search is not None and len(self.tokens) > self.num_prompt

    @property
    def is_finished(self) -> bool:
        """True when no more tokens will come."""
        return self.status is SequenceStatus.FINISHED

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status.

        Raises:
            InvariantViolation: S5, a change that is not allowed.
        """
        if status not in TRANSITIONS[self.status]:
            raise InvariantViolation("S5", f"sequence {self.seq_id}: {self.status.value} to {status.value}")
        self.status = status


@dataclass(slots=True, eq=False)
class Request:
    """One prompt and how to continue it.

    Args:
        request_id: the caller's name for it.
        prompt_token_ids: never empty.
        params: valid sampling parameters.
        max_total_tokens: prompt and output together at most: the context length or `max_tokens`, whichever ends first.
        end_token_ids: tokens that end a sequence: the model's own, unless `ignore_eos`.
        arrival: rises with each request; the order of first come first served.
        priority: lower runs first under the priority policy.
        flow: names the requests that it is one of, such as those of a tenant: they take turns with others.
        namespace: where its blocks may be shared.
        media: what some of the prompt's tokens stand for, in the order of their places.
        retain_cache: have the blocks that it leaves behind evicted last.
        bad_words: token sequences that its outputs may not contain.
        dry_breakers: tokens across which nothing counts as repeated.
        grammar: what its `structured_outputs` compiled to; held so that the data plane finds it.
        seed: seed of its draws.
        sequences: the prompt's sequence first; after the fork one for each sample. Of a beam search by place, those
            that were given up among them.
        search: how far a beam search is; None for samples.
        num_known_prompt_logprobs: prompt positions whose log probabilities came back already.
        account: where the KV of the prompt came from at the first admission, and why the rest was computed, as far as
            the client may know; None before it.
        hit_end: why no more of the prompt was found; None before.
        differs_at: see `PrefixHit.differs_at`.
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
    media: tuple[Media, ...] = ()
    retain_cache: bool = False
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()
    grammar: object = None
    sequences: list[Sequence] = field(default_factory=list)
    search: BeamSearch | None = None
    num_known_prompt_logprobs: int = 0
    account: TokenAccount | None = None
    hit_end: HitEnd | None = None
    differs_at: int | None = None
    num_preemptions: int = 0
    order_key: tuple[int, int] = (0, 0)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that were found in the prefix cache at the first admission; None before it."""
        return None if self.account is None else sum(self.account.sources) - self.account.sources.computed

    @property
    def num_disk_tokens(self) -> int:
        """Of the cached tokens, those for which blocks were loaded from disk."""
        return 0 if self.account is None else self.account.sources.disk

    def record_hit(self, hit: PrefixHit, account: TokenAccount) -> None:
        """Note the prefix hit on which the prompt was opened."""
        self.account = account
        self.hit_end = hit.end
        self.differs_at = hit.differs_at

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that wait, run or are swapped out."""
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def is_forked(self) -> bool:
        """True once each sample has its own sequence."""
        return len(self.sequences) == self.params.num_sequences

    @property
    def is_finished(self) -> bool:
        """True when no sequence runs or waits; without one, no further sample can fork."""
        return bool(self.sequences) and all(sequence.is_finished for sequence in self.sequences)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a sequence, the request's own among them, once it has `min_tokens` of output."""
        return self.end_token_ids.union(self.params.stop_token_ids)

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Tokens that may not be sampled before `min_tokens` output tokens exist."""
        if not self.params.min_tokens:
            return ()
        return tuple(sorted(self.end_ids))

    @property
    def hit_limit(self) -> int | None:
        """Prompt tokens that a prefix hit may cover, None for all.

        A hit has no logits, so while prompt log probabilities are missing it may cover only positions whose
        successor is known already.
        """
        if self.params.prompt_logprobs is None or self.num_known_prompt_logprobs >= self.num_prompt - 1:
            return None
        return self.num_known_prompt_logprobs
