"""Metrics have the known names, true values, no client text, and forget finished requests."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config import ResolvedConfig
from quire.engine.exporters.prometheus import Metrics
from quire.engine.metrics.stats import StepStats
from quire.engine.metrics.stats_collector import COUNTERS
from quire.engine.outputs.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.memory.results import NO_TOKENS
from quire.scheduling.stats import metrics_of
from tests.engine.test_llm import greedy, load

CONFIG = ResolvedConfig(
    device="cpu", num_threads=1, max_model_len=300, block_size=16, num_blocks=40, bytes_per_block=1024,
    enable_prefix_caching=True, watermark=0.01, swap_space=4096, max_num_seqs=8, max_num_batched_tokens=64,
    scheduling_policy="fcfs", priority_aging=256, max_queue_len=None, vocab_size=100, seed=0,
    eviction_policy="lru", preemption_policy="last", preemption_mode="auto",
    kernels="torch",
    longest_blocks=19, max_concurrency=2,
)  # fmt: skip


def samples(metrics: Metrics) -> dict[str, float]:
    """Read the rendered text as a scraper does; names carry the labels but the model's."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            shown = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            values[f"{sample.name}{{{shown}}}" if shown else sample.name] = sample.value
    return values


class Clock:
    """A clock that stands still until it is set."""

    now_s = 0.0


def step(**changes: float) -> StepStats:
    return StepStats()._replace(**changes)


def news(
    times: RequestMetrics, *outputs: CompletionOutput, request_id: str = "r", finished: bool = False
) -> RequestOutput:
    return RequestOutput(request_id, "a client's words", [1, 2, 3], list(outputs), finished, metrics=times)


def test_levels_are_set_and_counts_add_up() -> None:
    metrics = Metrics("tiny")
    first = {"prefix_queries": 30, "prefix_hits": 16, "prompt_tokens": 40, "generation_tokens": 2, "step_tokens": 26}
    metrics.on_step(step(num_running=3, num_waiting=2, kv_usage=0.5, num_preemptions=1, **first))
    metrics.on_step(step(num_running=1, kv_usage=0.25, generation_tokens=1, step_tokens=1))
    values = samples(metrics)
    assert values["vllm:num_requests_running"] == 1
    assert values["vllm:num_requests_waiting"] == 0
    assert values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["vllm:prefix_cache_queries_total"] == 30
    assert values["vllm:prefix_cache_hits_total"] == 16
    assert values["vllm:num_preemptions_total"] == 1
    assert values["vllm:prompt_tokens_total"] == 40
    assert values["vllm:generation_tokens_total"] == 3
    assert values["vllm:iteration_tokens_total_count"] == 2
    assert values["vllm:iteration_tokens_total_sum"] == 27


def test_each_field_of_a_step_that_names_a_metric_is_shown() -> None:
    metrics = Metrics("tiny")
    named = {field: metric for field, metric in metrics_of(StepStats).items() if metric.name is not None}
    amounts = {field: amount for amount, field in enumerate(named, start=2)}
    for _ in range(2):
        metrics.on_step(step(**amounts))
    values = samples(metrics)
    ends = {"counter": ("_total", 2), "gauge": ("", 1), "histogram": ("_sum", 2)}
    for field, metric in named.items():
        end, num_times = ends[metric.kind]
        assert values[f"vllm:{metric.name}{end}"] == num_times * amounts[field], field


@pytest.mark.parametrize("options", [{}, {"swap_space": 1 << 22, "preemption_mode": "swap"}])
def test_what_steps_add_is_what_there_is_in_the_end(options: dict[str, object]) -> None:
    llm = load(num_kv_blocks=40, speculative_method="ngram", **options)
    for start in range(12):
        llm.engine.add_request(str(start), [7] * 20 + list(range(10 + start, 60 + start)), greedy(40, ignore_eos=True))
    added, by_position = dict.fromkeys(COUNTERS, 0), [0] * 9
    first_time = resumed = NO_TOKENS
    while llm.engine.has_unfinished:
        llm.engine.step()
        last = llm.engine.measure()
        added = {name: count + getattr(last, name) for name, count in added.items()}
        first_time, resumed = first_time.plus(last.first_time), resumed.plus(last.resumed)
        for position, count in enumerate(last.accepted_by_position):
            by_position[position] += count
    stats = llm.stats
    assert added == {name: getattr(stats, name) for name in COUNTERS}
    assert (first_time, resumed) == (stats.first_time, stats.resumed)
    assert by_position[: len(stats.accepted_by_position)] == stats.accepted_by_position
    assert sum(by_position) == stats.num_accepted_tokens > 0
    assert min(stats.num_preemptions, stats.prefix_hits, stats.prompt_tokens, stats.num_drafts) > 0
    assert bool(stats.swap_out_blocks) == bool(stats.swap_in_blocks) == ("swap_space" in options)
    llm.close()


def test_the_times_of_a_request_are_those_of_its_stages() -> None:
    clock = Clock()
    metrics = Metrics("tiny", clock=lambda: clock.now_s)
    times = RequestMetrics(arrival_s=10.0, first_scheduled_s=11.0, first_token_s=13.0, num_prompt_tokens=3)
    clock.now_s = 13.0
    metrics.on_outputs([news(times, CompletionOutput(0, "a", [5]))])
    clock.now_s = 13.5
    metrics.on_outputs([news(times, CompletionOutput(0, "", []))])
    clock.now_s = 14.0
    metrics.on_outputs([news(times, CompletionOutput(0, "b", [6]))])
    times.finished_s = 17.0
    clock.now_s = 17.0
    metrics.on_outputs([news(times, CompletionOutput(0, "c", [7, 8], finish_reason="stop"), finished=True)])
    values = samples(metrics)
    expected = {
        "time_to_first_token_seconds": (1, 3.0),
        "inter_token_latency_seconds": (3, 4.0),
        "e2e_request_latency_seconds": (1, 7.0),
        "request_queue_time_seconds": (1, 1.0),
        "request_prefill_time_seconds": (1, 2.0),
        "request_decode_time_seconds": (1, 4.0),
        "request_inference_time_seconds": (1, 6.0),
        "request_prompt_tokens": (1, 3),
        "request_generation_tokens": (1, 4),
        "request_max_num_generation_tokens": (1, 4),
        "request_prefill_kv_computed_tokens": (1, 3),
        "request_num_preemptions": (1, 0),
        "request_time_per_output_token_seconds": (1, pytest.approx(4 / 3)),
    }
    seen = {name: (values[f"vllm:{name}_count"], values[f"vllm:{name}_sum"]) for name in expected}
    assert seen == expected
    assert values["vllm:request_success_total{finished_reason=stop}"] == 1
    # The last two tokens came together after 3 s: that is two gaps of 1.5 s, not one of 3 s.
    assert values["vllm:inter_token_latency_seconds_bucket{le=1.0}"] == 1
    assert values["vllm:inter_token_latency_seconds_bucket{le=2.0}"] == 3


def test_sequences_of_a_request_have_their_own_gaps_and_one_end() -> None:
    clock = Clock()
    metrics = Metrics("tiny", clock=lambda: clock.now_s)
    times = RequestMetrics(arrival_s=0.0, first_scheduled_s=0.0, first_token_s=1.0, finished_s=4.0)
    clock.now_s = 1.0
    metrics.on_outputs([news(times, CompletionOutput(0, "a", [1]), CompletionOutput(1, "a", [1]))])
    clock.now_s = 2.0
    metrics.on_outputs([news(times, CompletionOutput(0, "b", [2], finish_reason="stop"))])
    clock.now_s = 4.0
    metrics.on_outputs([news(times, CompletionOutput(1, "b", [2], finish_reason="length"), finished=True)])
    values = samples(metrics)
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == 2
    assert values["vllm:inter_token_latency_seconds_sum"] == 4.0
    assert values["vllm:request_generation_tokens_sum"] == 4
    reasons = {name: value for name, value in values.items() if "request_success_total" in name}
    assert sum(reasons.values()) == 1
    assert reasons["vllm:request_success_total{finished_reason=length}"] == 1


def test_preemptions_are_told_by_mode_and_swapped_blocks_by_direction() -> None:
    metrics = Metrics("tiny")
    metrics.on_step(step(num_swapped=2, host_usage=0.75, num_preemptions=3, num_swaps=2, wasted_tokens=40))
    metrics.on_step(step(num_swapped=1, host_usage=0.5, swap_out_blocks=7, swap_in_blocks=4))
    values = samples(metrics)
    assert (values["vllm:num_requests_swapped"], values["vllm:cpu_cache_usage_perc"]) == (1, 0.5)
    assert values["vllm:num_preemptions_total"] == 3
    assert values["vllm:preemptions_by_mode_total{mode=swap}"] == 2
    assert values["vllm:preemptions_by_mode_total{mode=recompute}"] == 1
    assert values["vllm:preemption_wasted_tokens_total"] == 40
    assert (values["vllm:swap_out_blocks_total"], values["vllm:swap_in_blocks_total"]) == (7, 4)


@pytest.mark.parametrize("outputs", [(), (CompletionOutput(0, finish_reason="abort"),)])
def test_a_request_that_never_ran_has_only_the_stages_it_saw(outputs: tuple[CompletionOutput, ...]) -> None:
    metrics = Metrics("tiny")
    metrics.on_outputs([news(RequestMetrics(arrival_s=1.0, finished_s=3.0), *outputs, finished=True)])
    values = samples(metrics)
    assert values["vllm:e2e_request_latency_seconds_sum"] == 2.0
    assert values["vllm:request_queue_time_seconds_count"] == 0
    assert values["vllm:time_to_first_token_seconds_count"] == 0
    assert values["vllm:request_success_total{finished_reason=abort}"] == 1


def test_a_finished_request_is_forgotten_and_its_name_can_be_used_again() -> None:
    metrics = Metrics("tiny")
    for _ in range(2):
        times = RequestMetrics(arrival_s=0.0, first_scheduled_s=0.0, first_token_s=1.0, finished_s=1.0)
        metrics.on_outputs([news(times, CompletionOutput(0, "a", [1], finish_reason="stop"), finished=True)])
    assert metrics._live == {}
    assert samples(metrics)["vllm:time_to_first_token_seconds_count"] == 2


def test_nothing_a_client_wrote_is_in_the_text() -> None:
    metrics = Metrics("tiny")
    times = RequestMetrics(arrival_s=0.0, first_scheduled_s=0.0, first_token_s=1.0, finished_s=1.0)
    metrics.set_config(CONFIG)
    output = CompletionOutput(0, "answered text", [1], finish_reason="stop", stop_reason="stop words")
    metrics.on_outputs([news(times, output, request_id="client-chosen", finished=True)])
    rendered = metrics.render().decode()
    for words in ("client", "answered", "words"):
        assert words not in rendered


def test_the_cache_s_configuration_is_shown() -> None:
    metrics = Metrics("tiny", prefix="quire")
    metrics.set_config(CONFIG)
    values = samples(metrics)
    info = [name for name in values if name.startswith("quire:cache_config_info")]
    assert len(info) == 1
    assert "num_blocks=40" in info[0]
    assert "block_size=16" in info[0]
    assert "swap_space_bytes=4096" in info[0]


def test_two_engines_do_not_mix() -> None:
    one, other = Metrics("tiny"), Metrics("tiny")
    one.on_step(step(generation_tokens=5))
    assert samples(other)["vllm:generation_tokens_total"] == 0


def test_lengths_of_requests_are_those_of_their_samples_and_parameters() -> None:
    metrics = Metrics("tiny")
    times = RequestMetrics(0.0, 1.0, first_token_s=2.0, finished_s=3.0, num_preemptions=2, num_prompt_tokens=3)
    outputs = [CompletionOutput(0, "a", [1, 2, 3], finish_reason="stop"), CompletionOutput(1, "b", [4])]
    output = news(times, *outputs, finished=True)
    output.num_cached_tokens = 2
    metrics.on_outputs([output])
    metrics.on_request(greedy(7))
    metrics.on_step(step(prefix_hits=16, num_waiting=3))
    values = samples(metrics)
    sums = {"max_num_generation_tokens": 3, "num_preemptions": 2, "prefill_kv_computed_tokens": 1}
    sums |= {"params_n": 1, "params_max_tokens": 7}
    assert {name: values[f"vllm:request_{name}_sum"] for name in sums} == sums
    assert values["vllm:prompt_tokens_cached_total"] == 16
    assert values["vllm:num_requests_waiting_by_reason{reason=capacity}"] == 3


def test_the_page_has_the_engine_and_the_process_and_no_times_of_creation() -> None:
    page = Metrics("tiny").render().decode()
    lines = [line for line in page.splitlines() if line.startswith("vllm:")]
    assert lines
    assert all('engine="0"' in line and 'model_name="tiny"' in line for line in lines)
    assert "process_resident_memory_bytes " in page
    assert "_created" not in page
