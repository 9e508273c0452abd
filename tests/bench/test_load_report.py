"""The figures of a load, by hand: whole seconds, so that sums are exact."""

from __future__ import annotations

from quire.measurement.bench.client import Outcome
from quire.measurement.bench.load import Load
from quire.measurement.bench.load_report import Targets, load_lines, summarise

NO_TARGETS = Targets()


def whole(due_s: float, pieces_s: list[float], ended_s: float, *usage: int | None) -> Outcome:
    return Outcome(due_s, due_s + 0.5, "completed", "", pieces_s, ended_s, *usage)


FAST = whole(0, [1, 2, 3], 4, 10, 6, 3)
# Six tokens in three pieces: a token a second on average.
SLOW = whole(10, [16, 18, 21], 22, 20, 0, 6)
FULL = Outcome(5, 5, "HTTP 429", "come back later", ended_s=6)
LOST = Outcome(6, 6, "connection", "Connection reset by peer", ended_s=7)
LOAD = Load(6, 5, [FAST, FULL, LOST, SLOW], 25, False)


def test_completed_requests_are_summed_up_and_failures_counted() -> None:
    report = summarise(LOAD, NO_TARGETS)
    assert (report.num_requests, report.completed, report.num_cut_off) == (6, 2, 1)
    assert report.failed == {"HTTP 429": 1, "connection": 1}
    assert report.errors == {"HTTP 429": "come back later", "connection": "Connection reset by peer"}
    assert (report.num_prompt_tokens, report.num_cached_tokens, report.num_new_tokens) == (30, 6, 9)
    assert (report.request_rate, report.output_tokens_per_s, report.total_tokens_per_s) == (2 / 25, 9 / 25, 39 / 25)
    assert report.max_lateness_s == 0.5
    assert report.goodput is None


def test_latencies_count_from_when_a_request_was_due() -> None:
    report = summarise(LOAD, NO_TARGETS)
    assert report.time_to_first_token_s == {"mean": 3.5, "p50": 1, "p90": 6, "p99": 6}
    assert report.end_to_end_s == {"mean": 8, "p50": 4, "p90": 12, "p99": 12}
    assert report.inter_token_latency_s == {"mean": 7 / 4, "p50": 1, "p90": 3, "p99": 3}
    assert report.time_per_output_token_s == {"mean": 1, "p50": 1, "p90": 1, "p99": 1}


def test_goodput_is_the_share_of_what_ended_that_met_every_target() -> None:
    assert summarise(LOAD, Targets(ttft_s=6)).goodput == 2 / 4
    assert summarise(LOAD, Targets(ttft_s=5.9)).goodput == 1 / 4
    assert summarise(LOAD, Targets(itl_s=1.0)).goodput == 2 / 4
    assert summarise(LOAD, Targets(itl_s=0.9)).goodput == 0
    report = summarise(LOAD, Targets(ttft_s=3, itl_s=1))
    assert (report.goodput, report.good_request_rate) == (1 / 4, 1 / 25)
    words = load_lines(report, Targets(ttft_s=3, itl_s=1))[-1]
    assert (
        words
        == "Goodput: 25.0% of requests within 3,000 ms to the first token and 1,000 ms between tokens, 0.04 a second"
    )


def test_pieces_stand_for_tokens_where_the_server_does_not_count() -> None:
    report = summarise(Load(1, 1, [whole(0, [1, 3, 5], 5)], 5, False), NO_TARGETS)
    assert (report.num_new_tokens, report.num_untold, report.num_prompt_tokens) == (3, 1, None)
    assert report.time_per_output_token_s["mean"] == 2
    assert "The server told no usage for 1 requests: their tokens are pieces of text" in load_lines(report, NO_TARGETS)


def test_an_answer_without_text_has_an_end_only() -> None:
    report = summarise(Load(1, 1, [whole(0, [], 2, 4, 0, 1)], 2, False), Targets(ttft_s=1))
    assert report.time_to_first_token_s == {}
    assert (report.end_to_end_s["mean"], report.num_new_tokens, report.goodput) == (2, 1, 0)


def test_a_load_of_nothing_but_failures_still_says_so() -> None:
    report = summarise(Load(9, 3, [FULL, FULL], 8, True), Targets(ttft_s=1))
    assert load_lines(report, Targets(ttft_s=1)) == [
        "Interrupted; 1 requests were under way, and are in no figure",
        "Completed 0 of 9 requests in 8.00 s: 0.00 requests/s",
        "Failed: 2 with HTTP 429 (come back later)",
    ]
    assert report.goodput == 0
