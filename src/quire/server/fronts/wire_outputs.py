"""Output deltas as rows of a message, and rows as deltas."""

from __future__ import annotations

from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.server.fronts.messages import DeltaRow, LogprobArrays, SampleRow
from quire.text.tokenizers.tokenizer import Tokenizer


def is_plain(output: RequestOutput) -> bool:
    """Return whether a delta is more text of the first sequence and nothing else, apart from what is known already."""
    if output.finished or len(output.outputs) != 1 or output.prompt_logprobs is not None:
        return False
    (sample,) = output.outputs
    return (
        sample.index == 0
        and sample.finish_reason is None
        and sample.cumulative_logprob is None
        and not sample.num_draft_tokens
        and sample.logprobs is None
    )


def delta_row(stream: int, output: RequestOutput) -> DeltaRow:
    """Return the row of a delta."""
    known = output.prompt_logprobs
    return DeltaRow(
        stream=stream,
        outputs=list(map(_sample_row, output.outputs)),
        finished=output.finished,
        prompt_logprobs=None if known is None else _arrays(known.known),
        num_cached_tokens=output.num_cached_tokens,
        num_disk_tokens=output.num_disk_tokens,
        cache_hit_end=output.cache_hit_end,
        cache_differs_at=output.cache_differs_at,
        prompt_account=output.prompt_account,
        num_pruned_tokens=output.num_pruned_tokens,
        pooled=output.pooled,
        error=output.error,
        error_code=output.error_code,
        kv_transfer_params=output.kv_transfer_params,
        metrics=output.metrics,
    )


def read_delta(
    row: DeltaRow, request_id: str, prompt: str | None, token_ids: list[int], tokenizer: Tokenizer | None
) -> RequestOutput:
    """Return the delta of a row."""
    known = row.prompt_logprobs
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=token_ids,
        outputs=[_sample(sample, tokenizer) for sample in row.outputs],
        finished=row.finished,
        prompt_logprobs=None if known is None else PromptLogprobs(_logprobs(known, tokenizer)),
        num_cached_tokens=row.num_cached_tokens,
        num_disk_tokens=row.num_disk_tokens,
        cache_hit_end=row.cache_hit_end,
        cache_differs_at=row.cache_differs_at,
        prompt_account=row.prompt_account,
        num_pruned_tokens=row.num_pruned_tokens,
        pooled=row.pooled,
        error=row.error,
        error_code=row.error_code,
        kv_transfer_params=row.kv_transfer_params,
        metrics=row.metrics,
    )


def _sample_row(output: CompletionOutput) -> SampleRow:
    return SampleRow(
        output.index,
        output.text,
        output.token_ids,
        output.finish_reason,
        output.stop_reason,
        output.num_draft_tokens,
        output.num_accepted_tokens,
        output.cumulative_logprob,
        output.beam_score,
        None if output.logprobs is None else _arrays(output.logprobs),
    )


def _sample(row: SampleRow, tokenizer: Tokenizer | None) -> CompletionOutput:
    return CompletionOutput(
        index=row.index,
        text=row.text,
        token_ids=row.token_ids,
        cumulative_logprob=row.cumulative_logprob,
        logprobs=None if row.logprobs is None else _logprobs(row.logprobs, tokenizer),
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason,
        num_draft_tokens=row.num_draft_tokens,
        num_accepted_tokens=row.num_accepted_tokens,
        beam_score=row.beam_score,
    )


def _arrays(logprobs: FlatLogprobs) -> LogprobArrays:
    return LogprobArrays(*logprobs.to_bytes())


def _logprobs(arrays: LogprobArrays, tokenizer: Tokenizer | None) -> FlatLogprobs:
    return FlatLogprobs.from_bytes((arrays.token_ids, arrays.logprobs, arrays.ends, arrays.ranks), tokenizer)
