"""The scheduler's counters, and the declaration of a metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Literal, NamedTuple, get_type_hints

from quire.memory.results import NO_TOKENS, TokenAccount


class Metric(NamedTuple):
    """Description of a counter or a measured field, in its annotation: `Annotated[int, Metric(...)]`.

    The Prometheus exposition, the statistics of a step, `LLM.stats` and `GET /kv` are derived from these annotations.

    Args:
        help: meaning of the field.
        name: name in the Prometheus exposition, without the prefix; None leaves the field out.
        kind: type of the metric; a histogram observes the value of each step that is not 0.
        unit: unit of a histogram, which decides its buckets.
        kv_key: key in the answer to `GET /kv`; None leaves the field out.
    """

    help: str
    name: str | None = None
    kind: Literal["counter", "gauge", "histogram"] = "counter"
    unit: Literal["seconds", "tokens"] = "tokens"
    kv_key: str | None = None


@cache
def metrics_of(stats: type) -> Mapping[str, Metric]:
    """Return the metrics that a class declares, by field, inherited ones first."""
    hints = get_type_hints(stats, include_extras=True)
    declared = {name: getattr(hint, "__metadata__", (None,))[0] for name, hint in hints.items()}
    return {name: metric for name, metric in declared.items() if isinstance(metric, Metric)}


@dataclass(slots=True)
class SchedulerStats:
    """Counters of a scheduler since its start."""

    prefix_queries: Annotated[int, Metric("Prompt tokens looked up in the prefix cache.", "prefix_cache_queries")] = 0
    prefix_hits: Annotated[int, Metric("Prompt tokens found in the prefix cache.", "prefix_cache_hits")] = 0
    # Separate from the two above: a resumed sequence that hits its own blocks says nothing about sharing.
    resumed_queries: Annotated[int, Metric("Tokens looked up when preempted sequences came back.")] = 0
    resumed_hits: Annotated[int, Metric("Tokens found when preempted sequences came back.")] = 0
    first_time: Annotated[TokenAccount, Metric("Prompt tokens at first admission, by source and by reason.")] = (
        NO_TOKENS
    )
    resumed: Annotated[TokenAccount, Metric("All tokens of sequences that came back, by source and by reason.")] = (
        NO_TOKENS
    )
    num_preemptions: Annotated[
        int, Metric("Times that a running sequence lost its memory.", "num_preemptions", kv_key="preemptions")
    ] = 0
    num_swaps: Annotated[int, Metric("Preemptions that swapped the sequence out.", kv_key="swaps")] = 0
    wasted_tokens: Annotated[
        int, Metric("Computed tokens that recomputing lost.", "preemption_wasted_tokens", kv_key="wasted_tokens")
    ] = 0
    num_drafts: Annotated[int, Metric("Times that a sequence's drafts were verified.", "spec_decode_num_drafts")] = 0
    num_draft_tokens: Annotated[int, Metric("Drafts that were verified.", "spec_decode_num_draft_tokens")] = 0
    num_accepted_tokens: Annotated[
        int, Metric("Of those, drafts that were right.", "spec_decode_num_accepted_tokens")
    ] = 0
    accepted_by_position: Annotated[
        list[int], Metric("Drafts that were right, by their position after the last token.")
    ] = field(default_factory=list)

    def record_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Count the drafts of a sequence in a step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        by_position = self.accepted_by_position
        by_position += [0] * (num_accepted - len(by_position))
        for position in range(num_accepted):
            by_position[position] += 1
