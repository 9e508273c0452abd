"""The report of a server under load, as numbers and as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from quire.measurement.bench.client import COMPLETED, Outcome
from quire.measurement.bench.load import Load
from quire.measurement.bench.percentiles import latency_lines, percentiles


class Targets(NamedTuple):
    """Upper bounds of a request's latencies, in seconds; None for no bound.

    Args:
        ttft_s: time to the first token.
        itl_s: mean time between two tokens.
    """

    ttft_s: float | None = None
    itl_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """The results of a load. Latencies count from the due time of a request; only completed requests have latencies.

    Args:
        num_requests: number of requests to send.
        completed: number of requests with a complete answer.
        failed: kind -> number of requests.
        num_cut_off: number of requests in flight when the run was interrupted.
        errors: kind -> message of the first failure.
        duration_s: seconds from the first request's due time to the end of the last one.
        num_prompt_tokens, num_cached_tokens, num_new_tokens: numbers of tokens of completed requests in the server's
            usage; None if no answer states the number. New tokens without a usage are counted as pieces.
        num_untold: number of completed requests without a usage.
        request_rate, output_tokens_per_s, total_tokens_per_s: completed requests and tokens per second of `duration_s`.
        time_to_first_token_s: percentile -> seconds to the first piece of text, for requests with text.
        inter_token_latency_s: percentile -> seconds between two pieces of text of one request; a piece is one or a few
            tokens.
        time_per_output_token_s: percentile -> mean seconds between two tokens of a request.
        end_to_end_s: percentile -> seconds to the end of the answer.
        max_lateness_s: largest delay between a request's due time and its sending.
        goodput: share of the ended requests that were completed within the targets; None without targets.
        good_request_rate: requests completed within the targets per second; None without targets.
        is_interrupted: True if the load was stopped early.
    """

    num_requests: int
    completed: int
    failed: dict[str, int]
    num_cut_off: int
    errors: dict[str, str]
    duration_s: float
    num_prompt_tokens: int | None
    num_cached_tokens: int | None
    num_new_tokens: int
    num_untold: int
    request_rate: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    time_to_first_token_s: dict[str, float]
    inter_token_latency_s: dict[str, float]
    time_per_output_token_s: dict[str, float]
    end_to_end_s: dict[str, float]
    max_lateness_s: float
    goodput: float | None
    good_request_rate: float | None
    is_interrupted: bool


def summarise(load: Load, targets: Targets) -> LoadReport:
    """Return the report of a load."""
    whole = [outcome for outcome in load.outcomes if outcome.kind == COMPLETED]
    failed = [outcome for outcome in load.outcomes if outcome.kind != COMPLETED]
    spoken = [outcome for outcome in whole if outcome.pieces_s]
    num_prompt, num_cached = (
        _sum([outcome.num_prompt for outcome in whole]),
        _sum([outcome.num_cached for outcome in whole]),
    )
    num_new, duration_s = sum(map(num_tokens, whole)), load.duration_s
    num_good = sum(_is_good(outcome, targets) for outcome in whole)
    has_targets = any(target is not None for target in targets)
    return LoadReport(
        num_requests=load.num_requests,
        completed=len(whole),
        failed=dict(Counter(outcome.kind for outcome in failed)),
        num_cut_off=load.num_sent - len(load.outcomes),
        errors={outcome.kind: outcome.detail for outcome in reversed(failed)},
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_new_tokens=num_new,
        num_untold=sum(outcome.num_new is None for outcome in whole),
        request_rate=len(whole) / duration_s,
        output_tokens_per_s=num_new / duration_s,
        total_tokens_per_s=((num_prompt or 0) + num_new) / duration_s,
        time_to_first_token_s=percentiles([outcome.pieces_s[0] - outcome.due_s for outcome in spoken]),
        inter_token_latency_s=percentiles([b - a for outcome in spoken for a, b in pairwise(outcome.pieces_s)]),
        time_per_output_token_s=percentiles([_token_s(outcome) for outcome in spoken if num_tokens(outcome) > 1]),
        end_to_end_s=percentiles([outcome.ended_s - outcome.due_s for outcome in whole]),
        max_lateness_s=max((outcome.sent_s - outcome.due_s for outcome in load.outcomes), default=0.0),
        goodput=num_good / len(load.outcomes) if has_targets and load.outcomes else None,
        good_request_rate=num_good / duration_s if has_targets else None,
        is_interrupted=load.is_interrupted,
    )


def num_tokens(outcome: Outcome) -> int:
    """Return the number of new tokens of a request; without a usage, its number of pieces."""
    return len(outcome.pieces_s) if outcome.num_new is None else outcome.num_new


def load_lines(report: LoadReport, targets: Targets) -> list[str]:
    """Return a report as lines of text."""
    shown = [
        f"Completed {report.completed:,} of {report.num_requests:,} requests in {report.duration_s:.2f} s: "
        f"{report.request_rate:,.2f} requests/s"
    ]
    if report.is_interrupted:
        shown.insert(0, f"Interrupted; {report.num_cut_off:,} requests were under way, and are in no figure")
    for kind, count in report.failed.items():
        shown.append(f"Failed: {count:,} with {kind} ({report.errors[kind]})")
    if not report.completed:
        return shown
    prompt = "" if report.num_prompt_tokens is None else f"{report.num_prompt_tokens:,} prompt tokens"
    if report.num_cached_tokens is not None:
        prompt += f" ({report.num_cached_tokens:,} from the prefix cache)"
    shown.append(", ".join(filter(None, (prompt, f"{report.num_new_tokens:,} new tokens"))))
    if report.num_untold:
        shown.append(f"The server told no usage for {report.num_untold:,} requests: their tokens are pieces of text")
    rates = f"Output: {report.output_tokens_per_s:,.1f} tokens/s"
    if report.num_prompt_tokens is not None:
        rates += f"; with prompts: {report.total_tokens_per_s:,.1f} tokens/s"
    latencies = {
        "Time to first token": report.time_to_first_token_s,
        "Inter-token latency": report.inter_token_latency_s,
        "Time per output token": report.time_per_output_token_s,
        "End to end": report.end_to_end_s,
    }
    shown += [rates, *latency_lines(latencies)]
    shown.append(f"The client sent requests at most {1e3 * report.max_lateness_s:,.1f} ms after they were due")
    if report.goodput is not None:
        wanted = zip(("to the first token", "between tokens"), targets, strict=True)
        words = " and ".join(f"{1e3 * target:,.4g} ms {what}" for what, target in wanted if target is not None)
        shown.append(
            f"Goodput: {100 * report.goodput:.1f}% of requests within {words}, {report.good_request_rate:,.2f} a second"
        )
    return shown


def _is_good(outcome: Outcome, targets: Targets) -> bool:
    first_s = (outcome.pieces_s[0] if outcome.pieces_s else outcome.ended_s) - outcome.due_s
    is_soon = targets.ttft_s is None or first_s <= targets.ttft_s
    return is_soon and (targets.itl_s is None or _token_s(outcome) <= targets.itl_s)


def _token_s(outcome: Outcome) -> float:
    """Return the mean seconds between two tokens; 0 for a single token."""
    if num_tokens(outcome) < 2 or not outcome.pieces_s:
        return 0.0
    return (outcome.pieces_s[-1] - outcome.pieces_s[0]) / (num_tokens(outcome) - 1)


def _sum(counts: Sequence[int | None]) -> int | None:
    known_counts = [count for count in counts if count is not None]
    return sum(known_counts) if known_counts else None
