"""Percentiles, by hand."""

from __future__ import annotations

from quire.measurement.bench.percentiles import latency_lines, percentiles


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentiles(values) == {"mean": 50.5, "p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([3.0]) == {"mean": 3.0, "p50": 3.0, "p90": 3.0, "p99": 3.0}
    assert percentiles([]) == {}


def test_what_has_no_value_has_no_line() -> None:
    assert latency_lines({"First": {"mean": 1.5, "p50": 0.001}, "None": {}}) == ["First: mean 1,500.0 ms, p50 1.0 ms"]
