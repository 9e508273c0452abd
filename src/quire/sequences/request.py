"""A request: what a client asked for, and the sequences that it owns."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.memory.chain import Namespace
from quire.memory.status import HitEnd, PrefixHit, TokenAccount
from quire.sequences.beams import BeamSearch
from quire.sequences.media import Media
from quire.sequences.params import SamplingParams
from quire.sequences.sequence import Sequence


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
        differs_at: the position of the first token that differs from what is published, when that is why.
        place: among all requests, the smaller the earlier; the scheduler's.
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
    place: tuple[int, int] = (0, 0)

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

    def note_hit(self, hit: PrefixHit, account: TokenAccount) -> None:
        """Note on what the prompt is opened, without what only the operator may know."""
        self.account = account.told()
        self.hit_end = hit.end.told
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
