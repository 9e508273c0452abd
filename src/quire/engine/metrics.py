"""Prometheus metrics, with the names and meanings that dashboards for LLM servers know."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from quire.config import ResolvedConfig
from quire.engine.engine import Engine
from quire.engine.kv_metrics import KvMetrics
from quire.engine.outputs import RequestMetrics, RequestOutput
from quire.engine.stats import StepStats
from quire.engine.store_metrics import StoreCollector
from quire.execution.prefix_store import StoreStats
from quire.memory.status import HitEnd, TokenAccount, TokenSources

# A request whose sequences ended for several reasons counts once, under the first of these.
FINISH_REASONS = ("error", "abort", "length", "stop")


class Metrics:
    """Counts what the engine does, for one model.

    Each object has a registry of its own, so that two engines of a process never mix. Labels hold the model's name,
    a finish reason, a preemption's mode, a draft's place, a source of tokens or why they were computed, and the
    engine's configuration; nothing that a client wrote.

    Args:
        model_name: value of the label `model_name`, as the server shows it.
        prefix: what stands before the colon of each name.
        registry: where to register; None makes a new one.
        clock: the one that the engine stamps requests with; seconds, monotonic.

    Attributes:
        tells_namespaces: count prompts that are cached in another namespace only under a reason of their own, and not
            under that for prompts that nobody has seen.
    """

    def __init__(
        self,
        model_name: str,
        prefix: str = "vllm",
        registry: CollectorRegistry | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registry = CollectorRegistry() if registry is None else registry
        self._model_name = model_name
        self._prefix = prefix
        self._clock = clock
        self.tells_namespaces = True
        self._live: dict[str, _Live] = {}
        self._make_gauges_and_counters()
        self._make_histograms()

    def set_config(self, config: ResolvedConfig) -> None:
        """Show the engine's configuration as `cache_config_info`; once."""
        shown = {
            "model_name": self._model_name,
            "device": config.device,
            "block_size": str(config.block_size),
            "num_blocks": str(config.num_blocks),
            "bytes_per_block": str(config.bytes_per_block),
            "max_model_len": str(config.max_model_len),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "swap_space_bytes": str(config.swap_space),
        }
        name = f"{self._prefix}:cache_config_info"
        Gauge(name, "The KV cache, in labels.", list(shown), registry=self.registry).labels(**shown).set(1)

    def set_engine(self, engine: Engine) -> None:
        """Show an engine's memory as it is whenever the metrics are rendered; once."""
        self.registry.register(KvMetrics(engine, self._model_name, self._prefix))

    def watch_store(self, stats: Callable[[], StoreStats | None]) -> None:
        """Show the counters of the prefix cache on disk, if there is one; once.

        Args:
            stats: returns them whenever metrics are asked for.
        """
        if stats() is not None:
            self.registry.register(StoreCollector(stats, self._model_name, self._prefix))

    def on_step(self, stats: StepStats) -> None:
        """Take in the numbers of one step."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._swapped.set(stats.num_swapped)
        self._kv_usage.set(stats.kv_usage)
        self._host_usage.set(stats.host_usage)
        self._prefix_queries.inc(stats.prefix_queries)
        self._prefix_hits.inc(stats.prefix_hits)
        self._count_tokens("first", stats.first_time)
        self._count_tokens("resumed", stats.resumed)
        self._preemptions.inc(stats.num_preemptions)
        self._preemptions_by_mode["swap"].inc(stats.num_swaps)
        self._preemptions_by_mode["recompute"].inc(stats.num_preemptions - stats.num_swaps)
        self._wasted_tokens.inc(stats.wasted_tokens)
        self._swap_out_blocks.inc(stats.swap_out_blocks)
        self._swap_in_blocks.inc(stats.swap_in_blocks)
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._generation_tokens.inc(stats.generation_tokens)
        if stats.num_drafts:
            self._drafts.inc(stats.num_drafts)
            self._draft_tokens.inc(stats.num_draft_tokens)
            self._accepted_tokens.inc(stats.num_accepted_tokens)
            for position, count in enumerate(stats.accepted_by_position):
                if count:
                    self._accepted_by_position.labels(self._model_name, str(position)).inc(count)
        if stats.step_tokens:
            self._step_tokens.observe(stats.step_tokens)

    def on_output(self, delta: RequestOutput) -> None:
        """Take in the news of one request, when it comes: every delta, in order, up to the finished one."""
        now_s = self._clock()
        live = self._live.setdefault(delta.request_id, _Live())
        for output in delta.outputs:
            if output.token_ids:
                self._note_tokens(live, output.index, len(output.token_ids), delta.metrics, now_s)
            if output.finish_reason is not None:
                live.reasons.add(output.finish_reason)
        if delta.finished:
            del self._live[delta.request_id]
            self._note_finish(live, delta)

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _count_tokens(self, admission: str, account: TokenAccount) -> None:
        for source, count in account.sources._asdict().items():
            if count:
                self._tokens_by_source.labels(self._model_name, admission, source).inc(count)
        for reason, count in (account if self.tells_namespaces else account.told()).by_reason().items():
            if count:
                self._tokens_by_reason.labels(self._model_name, admission, reason).inc(count)

    def _note_tokens(self, live: _Live, idx: int, num_tokens: int, times: RequestMetrics, now_s: float) -> None:
        if live.num_generated == 0:
            first_s = now_s if times.first_token_s is None else times.first_token_s
            self._first_token_time.observe(max(0.0, first_s - times.arrival_s))
        last_s = live.last_token_s.get(idx)
        if last_s is not None:
            # Tokens that came together share the wait, so that the sum is the time and the count the tokens.
            for _ in range(num_tokens):
                self._inter_token_time.observe(max(0.0, now_s - last_s) / num_tokens)
        live.last_token_s[idx] = now_s
        live.num_generated += num_tokens

    def _note_finish(self, live: _Live, delta: RequestOutput) -> None:
        reason = next((known for known in FINISH_REASONS if known in live.reasons), "abort")
        self._success.labels(model_name=self._model_name, finished_reason=reason).inc()
        self._request_prompt_tokens.observe(len(delta.prompt_token_ids))
        self._request_generation_tokens.observe(live.num_generated)
        times = delta.metrics
        spans = (
            (self._e2e_time, times.arrival_s, times.finished_s),
            (self._queue_time, times.arrival_s, times.first_scheduled_s),
            (self._prefill_time, times.first_scheduled_s, times.first_token_s),
            (self._decode_time, times.first_token_s, times.finished_s),
            (self._inference_time, times.first_scheduled_s, times.finished_s),
        )
        for histogram, start_s, end_s in spans:
            # A request that ended early never reached the later stages.
            if start_s is not None and end_s is not None:
                histogram.observe(max(0.0, end_s - start_s))

    def _make_gauges_and_counters(self) -> None:
        self._running = self._gauge("num_requests_running", "Sequences that run.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all of them.")
        self._swapped = self._gauge("num_requests_swapped", "Sequences whose blocks are on the host.")
        self._host_usage = self._gauge("cpu_cache_usage_perc", "Share of the swap space in use; 1 is all of it.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = self._counter("num_preemptions", "Times that a running sequence lost its memory.")
        by_mode = Counter(
            f"{self._prefix}:preemptions_by_mode",
            "Times that a running sequence lost its memory, by how it is given back.",
            ["model_name", "mode"],
            registry=self.registry,
        )
        self._preemptions_by_mode = {
            mode: by_mode.labels(model_name=self._model_name, mode=mode) for mode in ("recompute", "swap")
        }
        self._wasted_tokens = self._counter("preemption_wasted_tokens", "Computed tokens that recomputing lost.")
        self._swap_out_blocks = self._counter("swap_out_blocks", "Blocks copied to the host for preempted sequences.")
        self._swap_in_blocks = self._counter("swap_in_blocks", "Blocks copied back when they came in again.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that ran.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._drafts = self._counter("spec_decode_num_drafts", "Times that a sequence's drafts were verified.")
        self._draft_tokens = self._counter("spec_decode_num_draft_tokens", "Drafts that were verified.")
        self._accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Of those, drafts that were right.")
        self._accepted_by_position = Counter(
            f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by their place behind the last token.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self._success = Counter(
            f"{self._prefix}:request_success",
            "Requests that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in FINISH_REASONS:
            self._success.labels(model_name=self._model_name, finished_reason=reason)
        self._tokens_by_source = Counter(
            f"{self._prefix}:prompt_tokens_by_source",
            "Tokens of the sequences that were let in, by where their KV came from.",
            ["model_name", "admission", "source"],
            registry=self.registry,
        )
        self._tokens_by_reason = Counter(
            f"{self._prefix}:prompt_tokens_computed_by_reason",
            "Of those, tokens that were computed, by why the prefix cache did not have them.",
            ["model_name", "admission", "reason"],
            registry=self.registry,
        )
        for admission in ("first", "resumed"):
            for source in TokenSources._fields:
                self._tokens_by_source.labels(self._model_name, admission, source)
            for end in HitEnd:
                self._tokens_by_reason.labels(self._model_name, admission, end.label)

    def _make_histograms(self) -> None:
        seconds = _one_two_five(-3, 1_000)
        tokens = _one_two_five(0, 100_000)
        self._step_tokens = self._histogram("iteration_tokens_total", "Tokens computed in a step.", tokens)
        self._first_token_time = self._histogram("time_to_first_token_seconds", "Arrival to first token.", seconds)
        self._inter_token_time = self._histogram("inter_token_latency_seconds", "One token to the next.", seconds)
        self._e2e_time = self._histogram("e2e_request_latency_seconds", "Arrival to end.", seconds)
        self._queue_time = self._histogram("request_queue_time_seconds", "Arrival to first step.", seconds)
        self._prefill_time = self._histogram("request_prefill_time_seconds", "First step to first token.", seconds)
        self._decode_time = self._histogram("request_decode_time_seconds", "First token to end.", seconds)
        self._inference_time = self._histogram("request_inference_time_seconds", "First step to end.", seconds)
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Tokens of a request's prompt.", tokens)
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a request, all its sequences together.", tokens
        )

    def _gauge(self, name: str, meaning: str) -> Gauge:
        gauge = Gauge(f"{self._prefix}:{name}", meaning, ["model_name"], registry=self.registry)
        return gauge.labels(model_name=self._model_name)

    def _counter(self, name: str, meaning: str) -> Counter:
        counter = Counter(f"{self._prefix}:{name}", meaning, ["model_name"], registry=self.registry)
        return counter.labels(model_name=self._model_name)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        full_name = f"{self._prefix}:{name}"
        histogram = Histogram(full_name, meaning, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(model_name=self._model_name)


@dataclass(slots=True)
class _Live:
    """What is remembered of a request until it ends.

    Args:
        last_token_s: when each sequence, by index, had its last token.
        num_generated: tokens so far, all sequences together.
        reasons: why the sequences that have ended did.
    """

    last_token_s: dict[int, float] = field(default_factory=dict)
    num_generated: int = 0
    reasons: set[str] = field(default_factory=set)


def _one_two_five(exponent: int, last: float) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, ... times `10 ** exponent`, up to and including the first that reaches `last`."""
    bounds: list[float] = []
    while not bounds or bounds[-1] < last:
        bounds.append(float(f"{(1, 2, 5)[len(bounds) % 3]}e{exponent + len(bounds) // 3}"))
    return tuple(bounds)
