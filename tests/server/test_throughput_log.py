"""The server's throughput line in the log."""

from __future__ import annotations

from quire.engine.metrics.stats import EngineStats
from quire.server.operations.throughput_log import Sample, preemption_warning, report

NOTHING = EngineStats()


def test_it_says_what_happened_between_two_samples() -> None:
    before = Sample(10.0, NOTHING, 0, 0, 0.0)
    totals = NOTHING._replace(
        prompt_tokens=100, generation_tokens=50, computed_tokens=130, prefix_queries=80, prefix_hits=20
    )
    assert report(before, Sample(15.0, totals, 3, 2, 0.456, 1)) == (
        "Throughput: prompt 20.0 tokens/s, generation 10.0 tokens/s, computed 26.0 tokens/s; running 3, "
        "waiting 2, swapped 1; KV cache usage 45.6%; prefix cache hit rate 25.0%"
    )


def test_it_is_silent_when_idle() -> None:
    totals = NOTHING._replace(prompt_tokens=100, generation_tokens=50, prefix_queries=80)
    assert report(Sample(10.0, totals, 0, 0, 0.2), Sample(20.0, totals, 0, 0, 0.2)) is None


def test_it_speaks_of_tokens_that_are_computed_again() -> None:
    totals = NOTHING._replace(computed_tokens=512)
    line = report(Sample(10.0, NOTHING, 1, 0, 0.5), Sample(20.0, totals, 1, 0, 0.5))
    assert line is not None
    assert "computed 51.2 tokens/s" in line


def test_it_says_how_long_a_step_runs_that_takes_longer_than_the_interval() -> None:
    line = report(Sample(10.0, NOTHING, 1, 0, 0.5), Sample(20.0, NOTHING, 1, 0, 0.5, step_s=12.3))
    assert line is not None
    assert line.endswith("; the present step has run for 12 s")
    moved = Sample(20.0, NOTHING._replace(computed_tokens=1), 1, 0, 0.5, step_s=12.3)
    assert "present" not in str(report(Sample(10.0, NOTHING, 1, 0, 0.5), moved))


def test_it_speaks_of_work_that_does_not_move() -> None:
    line = report(Sample(10.0, NOTHING, 0, 1, 0.0), Sample(20.0, NOTHING, 0, 1, 0.0))
    assert line is not None
    assert "waiting 1" in line


def test_the_beginning_of_preemption_is_a_warning_once() -> None:
    before = Sample(10.0, NOTHING, 4, 0, 1.0)
    after = Sample(20.0, NOTHING._replace(num_preemptions=3, num_swaps=2), 1, 0, 1.0, 2)
    line = preemption_warning(before, after, is_going_on=False)
    assert line is not None
    assert "3 sequences lost their memory (2 swapped out" in line
    assert "2 are swapped out now" in line
    assert preemption_warning(before, after, is_going_on=True) is None
    assert preemption_warning(after, after, is_going_on=False) is None


def test_swapped_sequences_alone_are_shown() -> None:
    line = report(Sample(10.0, NOTHING, 0, 0, 0.0), Sample(20.0, NOTHING, 0, 0, 0.0, 1))
    assert line is not None
    assert "swapped 1" in line
