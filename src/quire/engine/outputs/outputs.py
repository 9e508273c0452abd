"""What comes out of the engine: a `RequestOutput` for each request with news, or one for the whole request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.memory.results import TokenAccount
from quire.sequences.params import RequestOutputKind
from quire.text.tool_calls import ToolCall


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request.

    Args:
        index: which of the `n` samples; of a beam search, 0 is the best output.
        text: the output's text (in a delta: the new part).
        token_ids: the output's token ids (in a delta: the new ones).
        cumulative_logprob: sum over the output so far of the chosen tokens' log probabilities; None without `logprobs`
            and `best_of`.
        beam_score: of a beam search: the sum of the log probabilities of the output's tokens, as penalties and the like
            have changed them, divided by its length to the power of `length_penalty`.
        logprobs: for each token of `token_ids` a dictionary of `Logprob` by token id; None without `logprobs`.
        finish_reason: None while running; then "stop", "length", "abort" or "error"; "tool_calls" where a chat with
            tools came to its end and called one of its own choice.
        stop_reason: the stop string or stop token id that ended the output; None for the model's own end token.
        num_draft_tokens: drafts that were verified for the output so far.
        num_accepted_tokens: of those, drafts that were right.
        content: of a chat with tools, the text outside calls; else None.
        tool_calls: of a chat with tools, the calls; the last is a part where the length or a stop string cut it off.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    beam_score: float | None = None
    content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """True once no more tokens will come."""
        return self.finish_reason is not None

    def copy(self) -> CompletionOutput:
        """Return a copy that later deltas leave as it is."""
        logprobs = None if self.logprobs is None else self.logprobs.copy()
        return replace(self, token_ids=self.token_ids.copy(), logprobs=logprobs)

    def add(self, news: CompletionOutput) -> None:
        """Merge a later delta of the same sequence into this output."""
        self.text += news.text
        self.token_ids += news.token_ids
        if self.logprobs is None:
            self.logprobs = news.logprobs
        elif news.logprobs is not None:
            self.logprobs.extend(news.logprobs)
        if news.cumulative_logprob is not None:
            self.cumulative_logprob = news.cumulative_logprob
        self.finish_reason = news.finish_reason
        self.stop_reason = news.stop_reason
        self.num_draft_tokens = news.num_draft_tokens
        self.num_accepted_tokens = news.num_accepted_tokens
        self.beam_score = news.beam_score


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of a monotonic clock, and what its prompt cost."""

    arrival_s: float = 0.0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """The state of one request, whole (`LLM.generate`) or as the news of a step (streams; see `RequestOutputKind`).

    Args:
        request_id: the caller's or the engine's name for the request.
        prompt: the prompt's text, None when it came as token ids.
        prompt_token_ids: the prompt's token ids; one list for all outputs of the request, not to be changed.
        outputs: whole: the sequences by index, all `n` unless the request failed before it forked, or a beam search
            found fewer. Delta: only those with news; of a beam search, and where `best_of` exceeds `n`, none before the
            last delta.
        finished: True in the last output of the request.
        prompt_logprobs: for each prompt token, None for the first one; only once, in the first delta.
        num_cached_tokens: tokens of the prompt that came from the prefix cache (first admission).
        num_disk_tokens: of those, tokens for which blocks were loaded from disk.
        cache_hit_end: why no more of them did, in words; None until the request was let in.
        cache_differs_at: position of the first token that differs from the cached block that continues the hit, where
            the hit ended because no cached prefix continues with the prompt's tokens and there is such a block.
        prompt_account: the prompt's tokens by source, and those that were computed by reason; None until it was let in.
        num_pruned_tokens: tokens of candidates that are in none of the outputs: samples that `best_of` left out, or
            beams that a search gave up; in the last output.
        error: why the request failed when a sequence's `finish_reason` is "error".
        error_code: then "request_failed" where what it asked for is to blame, and "engine_failed" elsewhere.
        metrics: times and preemptions.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0
    cache_hit_end: str | None = None
    cache_differs_at: int | None = None
    prompt_account: TokenAccount | None = None
    num_pruned_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)

    def add(self, delta: RequestOutput) -> None:
        """Merge a later delta of the same request into this output."""
        by_index = {output.index: output for output in self.outputs}
        for news in delta.outputs:
            known = by_index.get(news.index)
            if known is None:
                self.outputs.append(news)
            else:
                known.add(news)
        self.outputs.sort(key=lambda output: output.index)
        self.finished = delta.finished
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.num_cached_tokens = delta.num_cached_tokens
        self.num_disk_tokens = delta.num_disk_tokens
        self.cache_hit_end = delta.cache_hit_end
        self.cache_differs_at = delta.cache_differs_at
        self.prompt_account = delta.prompt_account
        self.num_pruned_tokens = delta.num_pruned_tokens
        self.error = self.error or delta.error
        self.error_code = self.error_code or delta.error_code
        self.metrics = delta.metrics


class OutputCollector:
    """Makes the outputs that a caller wants from the deltas of one request.

    Args:
        kind: content of the outputs.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind = kind
        self._whole: RequestOutput | None = None

    def add(self, delta: RequestOutput) -> RequestOutput | None:
        """Take a delta; return the output to show for it, or None where there is none."""
        if self._kind is RequestOutputKind.DELTA:
            return delta
        if self._whole is None:
            self._whole = delta
        else:
            self._whole.add(delta)
        if self._kind is RequestOutputKind.FINAL_ONLY:
            return self._whole if delta.finished else None
        return replace(self._whole, outputs=[output.copy() for output in self._whole.outputs])
