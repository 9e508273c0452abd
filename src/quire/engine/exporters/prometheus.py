"""Prometheus metrics, with the names and meanings of common dashboards for LLM servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from quire.config import ResolvedConfig
from quire.engine.engine import Engine
from quire.engine.exporters.kv_collector import KvMetrics, LoraMetrics, time_histogram
from quire.engine.metrics.block_lifetimes import TimeHistogram
from quire.engine.metrics.stats import StepStats
from quire.engine.outputs.outputs import RequestMetrics, RequestOutput
from quire.memory.results import NO_TOKENS, HitEnd, TokenAccount, TokenSources
from quire.scheduling.stats import metrics_of
from quire.sequences.params import SamplingParams

# A request whose sequences ended for several reasons is counted once, under the first of these.
FINISH_REASONS = ("error", "abort", "length", "stop")
# Name, meaning, and the two fields of `RequestMetrics` whose difference is the time of a finished request.
REQUEST_TIMES = (
    ("e2e_request_latency_seconds", "Time from arrival to end.", "arrival_s", "finished_s"),
    ("request_queue_time_seconds", "Time from arrival to first step.", "arrival_s", "first_scheduled_s"),
    ("request_prefill_time_seconds", "Time from first step to first token.", "first_scheduled_s", "first_token_s"),
    ("request_decode_time_seconds", "Time from first token to end.", "first_token_s", "finished_s"),
    ("request_inference_time_seconds", "Time from first step to end.", "first_scheduled_s", "finished_s"),
)


class Metrics:
    """Metrics of one engine and model.

    Each object has its own registry, so that metrics of two engines in a process never mix. The values of labels are
    the model's name, finish reasons, preemption modes, positions of drafts, sources of tokens, reasons for computing
    them, the engine's configuration, and names of adapters; no text of clients.

    Args:
        model_name: value of the label `model_name`, as served.
        prefix: prefix of each name, before the colon.
        registry: registry of the metrics; None makes a new one.
        clock: clock of the engine's timestamps, monotonic, in seconds.
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
        self._live: dict[str, _Live] = {}
        self._token_gaps = TimeHistogram()
        self._make_step_metrics()
        self._make_request_metrics()
        self._make_length_metrics()
        ProcessCollector(registry=self.registry)

    def set_config(self, config: ResolvedConfig) -> None:
        """Export the engine's configuration as `cache_config_info`; called once."""
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
        Gauge(name, "KV cache settings, in labels.", list(shown), registry=self.registry).labels(**shown).set(1)

    def set_engine(self, engine: Engine) -> None:
        """Export an engine's memory, stores, KV transfer and adapters, at each rendering; called once."""
        self.registry.register(KvMetrics(engine, self._model_name, self._prefix))
        self.registry.register(LoraMetrics(engine, self._prefix))

    def on_step(self, stats: StepStats) -> None:
        """Update the metrics with the statistics of one step."""
        for read, set_level in self._gauges:
            set_level(read(stats))
        self._waiting_for_room.set(stats.num_waiting)
        for read, add in self._counters:
            value = read(stats)
            if value:
                add(value)
        self._count_tokens("first", stats.first_time)
        if stats.prefix_hits:
            self._cached_tokens.inc(stats.prefix_hits)
        self._count_tokens("resumed", stats.resumed)
        if stats.num_preemptions:
            self._preemptions_by_mode.labels(self._model_name, "swap").inc(stats.num_swaps)
            self._preemptions_by_mode.labels(self._model_name, "recompute").inc(stats.num_preemptions - stats.num_swaps)
        if stats.num_drafts:
            for position, count in enumerate(stats.accepted_by_position):
                if count:
                    self._accepted_by_position.labels(self._model_name, str(position)).inc(count)

    def on_request(self, params: SamplingParams) -> None:
        """Count a request that the engine has accepted."""
        self._params_n.observe(params.n)
        if params.max_tokens is not None:
            self._params_max_tokens.observe(params.max_tokens)

    def on_http_request(self, route: str, method: str, status: int) -> None:
        """Count an answered HTTP request.

        Args:
            route: path of the route.
            method: HTTP method.
            status: status of the answer; counted by its class, such as "2xx".
        """
        self._http_requests.labels(route, method, f"{status // 100}xx").inc()

    def on_outputs(self, deltas: Iterable[RequestOutput]) -> None:
        """Update the metrics with deltas of requests; called in order, when they are made."""
        now_s = self._clock()
        # Most deltas have further tokens of one sequence; deltas with equal times and counts are observed together.
        gap_counts: dict[tuple[float, int], int] = {}
        for delta in deltas:
            live = self._live.get(delta.request_id)
            if live is None or delta.finished or len(delta.outputs) != 1:
                self._note_delta(delta, now_s)
                continue
            (output,) = delta.outputs
            index = output.index
            last_s, num_tokens = live.last_token_s.get(index), len(output.token_ids)
            if last_s is None or not num_tokens or output.finish_reason is not None:
                self._note_delta(delta, now_s)
                continue
            key = last_s, num_tokens
            gap_counts[key] = gap_counts.get(key, 0) + 1
            live.last_token_s[index] = now_s
            live.num_generated += num_tokens
            live.num_of_sample[index] += num_tokens
        for (last_s, num_tokens), count in gap_counts.items():
            self._note_gaps(now_s - last_s, num_tokens, count)

    def _note_delta(self, delta: RequestOutput, now_s: float) -> None:
        live = self._live.get(delta.request_id)
        if live is None:
            live = self._live[delta.request_id] = _Live()
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
        return generate_latest(_Exposition(self.registry, self._prefix))

    def _count_tokens(self, admission: str, account: TokenAccount) -> None:
        if account is NO_TOKENS:
            return
        for source, count in account.sources._asdict().items():
            if count:
                self._tokens_by_source.labels(self._model_name, admission, source).inc(count)
        for reason, count in account.by_reason().items():
            if count:
                self._tokens_by_reason.labels(self._model_name, admission, reason).inc(count)

    def _note_tokens(self, live: _Live, idx: int, num_tokens: int, times: RequestMetrics, now_s: float) -> None:
        first_s = now_s if times.first_token_s is None else times.first_token_s
        if live.num_generated == 0:
            self._first_token_time.observe(max(0.0, first_s - times.arrival_s))
        last_s = live.last_token_s.get(idx)
        if last_s is not None:
            self._note_gaps(now_s - last_s, num_tokens)
        elif num_tokens > 1:  # the first delta has several tokens, and was made at the last of them
            self._note_gaps(now_s - first_s, num_tokens - 1)
        live.last_token_s[idx] = now_s
        live.num_generated += num_tokens
        live.num_of_sample[idx] = live.num_of_sample.get(idx, 0) + num_tokens

    def _note_gaps(self, wait_s: float, num_tokens: int, num_deltas: int = 1) -> None:
        """Observe the inter-token latencies of deltas; the tokens of a delta share its wait evenly.

        So the histogram's sum is the total time, and its count is the number of tokens.
        """
        self._token_gaps.add(max(0.0, wait_s) / num_tokens, num_tokens * num_deltas)

    def _note_finish(self, live: _Live, delta: RequestOutput) -> None:
        reason = next((candidate for candidate in FINISH_REASONS if candidate in live.reasons), "abort")
        self._success.labels(self._model_name, reason).inc()
        self._request_prompt_tokens.observe(len(delta.prompt_token_ids))
        self._request_generation_tokens.observe(live.num_generated)
        self._longest_sample_tokens.observe(max(live.num_of_sample.values(), default=0))
        self._request_preemptions.observe(delta.metrics.num_preemptions)
        if delta.metrics.first_scheduled_s is not None:
            self._prefill_tokens.observe(max(0, delta.metrics.num_prompt_tokens - delta.num_cached_tokens))
        first_s, finished_s = delta.metrics.first_token_s, delta.metrics.finished_s
        if first_s is not None and finished_s is not None and live.num_generated > 1:
            self._time_per_token.observe(max(0.0, finished_s - first_s) / (live.num_generated - 1))
        for read_stamps, histogram in self._request_times:
            start_s, end_s = read_stamps(delta.metrics)
            # A request that ended early has no timestamps of later stages.
            if start_s is not None and end_s is not None:
                histogram.observe(max(0.0, end_s - start_s))

    def _make_step_metrics(self) -> None:
        """Make a metric for each field of `StepStats` that declares one, and the metrics with more labels."""
        self._gauges: list[_Exporter] = []
        self._counters: list[_Exporter] = []
        for field_name, metric in metrics_of(StepStats).items():
            if metric.name is not None:
                read = attrgetter(field_name)
                if metric.kind == "gauge":
                    gauge = Gauge(self._full(metric.name), metric.help, ["model_name"], registry=self.registry)
                    self._gauges.append((read, gauge.labels(self._model_name).set))
                elif metric.kind == "counter":
                    counter = self._counter(metric.name, metric.help)
                    self._counters.append((read, counter.labels(self._model_name).inc))
                else:
                    self._counters.append((read, self._histogram(metric.name, metric.help, metric.unit).observe))
        self._preemptions_by_mode = self._counter(
            "preemptions_by_mode", "Preemptions of running sequences, by mode: recompute or swap.", "mode"
        )
        for mode in ("recompute", "swap"):
            self._preemptions_by_mode.labels(self._model_name, mode)
        self._cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens hit in the prefix cache.").labels(
            self._model_name
        )
        waiting = Gauge(
            self._full("num_requests_waiting_by_reason"),
            "Waiting requests, by reason; the reason is always capacity.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        waiting.labels(self._model_name, "deferred").set(0)
        self._waiting_for_room = waiting.labels(self._model_name, "capacity")
        meaning = metrics_of(StepStats)["accepted_by_position"].help
        self._accepted_by_position = self._counter("spec_decode_num_accepted_tokens_per_pos", meaning, "position")
        meaning = "Tokens of admitted sequences, by the source of their KV cache."
        self._tokens_by_source = self._counter("prompt_tokens_by_source", meaning, "admission", "source")
        meaning = "Computed tokens of admitted sequences, by the reason for the prefix cache miss."
        self._tokens_by_reason = self._counter("prompt_tokens_computed_by_reason", meaning, "admission", "reason")
        for admission in ("first", "resumed"):
            for source in TokenSources._fields:
                self._tokens_by_source.labels(self._model_name, admission, source)
            for end in HitEnd:
                self._tokens_by_reason.labels(self._model_name, admission, end.label)

    def _make_request_metrics(self) -> None:
        self._success = self._counter("request_success", "Finished requests, by reason.", "finished_reason")
        for reason in FINISH_REASONS:
            self._success.labels(self._model_name, reason)
        self._first_token_time = self._histogram("time_to_first_token_seconds", "Time to first token.", "seconds")
        name = self._full("inter_token_latency_seconds")
        self.registry.register(_TimeCollector(name, "Inter-token latency.", self._model_name, self._token_gaps))
        self._time_per_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time per output token of a finished request.", "seconds"
        )
        self._request_times = [
            (attrgetter(*stamps), self._histogram(name, meaning, "seconds")) for name, meaning, *stamps in REQUEST_TIMES
        ]
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens per request.", "tokens")
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens per request, all its sequences together.", "tokens"
        )

    def _make_length_metrics(self) -> None:
        """Make the histograms of request lengths and parameters, and the counter of HTTP requests."""
        self._longest_sample_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens in the longest output of a request.", "tokens"
        )
        self._request_preemptions = self._histogram("request_num_preemptions", "Preemptions per request.", "tokens")
        self._prefill_tokens = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens per request that were computed.", "tokens"
        )
        self._params_n = self._histogram("request_params_n", "Parameter n of requests.", "tokens")
        self._params_max_tokens = self._histogram("request_params_max_tokens", "Parameter max_tokens.", "tokens")
        # The name that the usual Prometheus middleware for HTTP servers has, without a prefix.
        labels = ["handler", "method", "status"]
        self._http_requests = Counter("http_requests", "HTTP requests by route.", labels, registry=self.registry)

    def _full(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(self._full(name), meaning, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, meaning: str, unit: str) -> Histogram:
        buckets = BUCKETS[unit]
        histogram = Histogram(self._full(name), meaning, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name)


# Getter of a field of `StepStats`, and setter of its metric.
_Exporter = tuple[Callable[[StepStats], float], Callable[[float], None]]


@dataclass(slots=True)
class _Live:
    """The state of an unfinished request.

    Args:
        last_token_s: time of the last token of each sequence, by index.
        num_generated: number of tokens so far, all sequences together.
        num_of_sample: number of tokens so far of each sequence, by index.
        reasons: finish reasons of the ended sequences.
    """

    last_token_s: dict[int, float] = field(default_factory=dict)
    num_generated: int = 0
    num_of_sample: dict[int, int] = field(default_factory=dict)
    reasons: set[str] = field(default_factory=set)


class _TimeCollector(Collector):
    """Exports a histogram of times."""

    def __init__(self, name: str, meaning: str, model_name: str, times: TimeHistogram) -> None:
        self._export = partial(time_histogram, name, meaning, model_name, times)

    def collect(self) -> Iterator[Metric]:
        yield self._export()


class _Exposition(Collector):
    """A registry for rendering: adds the label `engine`, as vLLM has it, and drops the `_created` samples."""

    def __init__(self, registry: CollectorRegistry, prefix: str) -> None:
        self._registry = registry
        self._start = f"{prefix}:"

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            more = {"engine": "0"} if metric.name.startswith(self._start) else {}
            metric.samples = [
                sample._replace(labels={**sample.labels, **more})
                for sample in metric.samples
                if not sample.name.endswith("_created")
            ]
            yield metric


def _one_two_five(exponent: int, last: float) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, ... times `10 ** exponent`, up to and including the first that reaches `last`."""
    bounds: list[float] = []
    while not bounds or bounds[-1] < last:
        bounds.append(float(f"{(1, 2, 5)[len(bounds) % 3]}e{exponent + len(bounds) // 3}"))
    return tuple(bounds)


BUCKETS = {"seconds": _one_two_five(-3, 1_000), "tokens": _one_two_five(0, 100_000)}
