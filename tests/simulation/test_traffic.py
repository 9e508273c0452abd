"""Synthetic traffic and traces: statistics, sessions, seeds, and errors that name line and field."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from typing import Any

import pytest

from quire.errors import ConfigError, TraceError
from quire.measurement.simulation.replicas.tokens import TokenSpan
from quire.measurement.simulation.trace_file import TraceTraffic
from quire.measurement.simulation.traffic import TRAFFIC, SyntheticTraffic, TrafficShape, lognormal_sigma


def test_lengths_and_arrivals_have_the_statistics_of_the_shape() -> None:
    shape = TrafficShape(
        num_requests=20000, rate=5.0, input_len=1000, input_sigma=0.5, output_len=200, output_sigma=1.0
    )
    requests = list(SyntheticTraffic(shape, 1).requests())
    assert len(requests) == 20000
    assert statistics.fmean(request.num_prompt for request in requests) == pytest.approx(1000, rel=0.03)
    assert statistics.fmean(request.num_new for request in requests) == pytest.approx(200, rel=0.05)
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(requests)]
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("burstiness", [0.0, 0.5, 3.0])
def test_bursts_vary_as_much_as_asked(burstiness: float) -> None:
    requests = list(SyntheticTraffic(TrafficShape(num_requests=20000, burstiness=burstiness), 2).requests())
    gaps = [later.arrival_s - earlier.arrival_s for earlier, later in pairwise(requests)]
    assert statistics.fmean(gaps) == pytest.approx(1.0, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(burstiness, rel=0.1, abs=1e-9)


def test_a_median_and_a_mean_give_the_deviation() -> None:
    shape = TrafficShape(num_requests=20000, output_len=211, output_sigma=lognormal_sigma(211, 129))
    requests = SyntheticTraffic(shape, 3).requests()
    assert statistics.median(request.num_new for request in requests) == pytest.approx(129, rel=0.05)


def test_a_turn_begins_with_all_before_it_and_the_number_of_turns_is_as_asked() -> None:
    shape = TrafficShape(num_requests=3000, turns=4, system_len=100, num_systems=3, think_s=5)
    traffic = SyntheticTraffic(shape, 4)
    firsts = list(traffic.requests())
    assert statistics.fmean([3000 / len(firsts)]) == pytest.approx(4, rel=0.1)
    num_requests, systems = 0, set()
    for request in firsts:
        systems.add(request.prompt[0].stream)
        turn: Any = request
        while turn is not None:
            num_requests += 1
            following = traffic.follow_up(turn, turn.arrival_s + 1)
            if following is not None:
                assert following.prompt[: len(turn.prompt) + 1] == (*turn.prompt, turn.output)
                assert following.arrival_s > turn.arrival_s + 1
                assert following.turn == turn.turn + 1
            turn = following
    assert num_requests == 3000
    assert systems == {0, 1, 2}


def test_lengths_of_a_session_do_not_depend_on_the_moments_of_its_answers() -> None:
    def lengths(delay: float) -> list[tuple[int, int]]:
        traffic = SyntheticTraffic(TrafficShape(num_requests=50, turns=10, input_sigma=1.0, output_sigma=1.0), 5)
        found, coming = [], list(traffic.requests())
        while coming:
            request = coming.pop(0)
            found.append((request.num_prompt, request.num_new))
            following = traffic.follow_up(request, request.arrival_s + delay)
            coming = coming if following is None else [*coming, following]
        return found

    assert lengths(1.0) == lengths(77.0)


def test_a_session_ends_before_its_context_is_too_long() -> None:
    shape = TrafficShape(num_requests=40, turns=40, fixed_turns=True, input_len=50, output_len=50, max_context=1000)
    traffic = SyntheticTraffic(shape, 6)
    request: Any = next(traffic.requests())
    list(traffic.requests())
    longest = 0
    while request is not None:
        longest = max(longest, request.num_prompt + request.num_new)
        request = traffic.follow_up(request, 0.0)
    assert longest == 1000


@pytest.mark.parametrize("name", TRAFFIC)
def test_every_named_traffic_is_valid_and_depends_on_the_seed_alone(name: str) -> None:
    values: dict[str, Any] = dict(TRAFFIC[name])
    shape = TrafficShape(**values, num_requests=200)
    one, again, other = (list(SyntheticTraffic(shape, seed).requests()) for seed in (1, 1, 2))
    assert one == again
    assert one != other


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"num_requests": 0}, "num_requests"),
        ({"num_requests": 1.5}, "num_requests"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": True}, "rate"),
        ({"turns": 0.5}, "turns"),
        ({"burstiness": -1}, "burstiness"),
        ({"fixed_turns": 1}, "fixed_turns"),
        ({"input_len": "9"}, "input_len"),
        ({"system_len": 100, "max_context": 50}, "system_len"),
    ],
)
def test_a_wrong_shape_is_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field) as caught:
        TrafficShape(**values)
    assert caught.value.field == field


# ---- traces ----


def trace(*lines: object, **options: Any) -> TraceTraffic:
    return TraceTraffic([line if isinstance(line, str) else json.dumps(line) for line in lines], "a.jsonl", **options)


def line(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 1000, "input_length": 1200, "output_length": 5, "hash_ids": [7, 8, 9], **changes}


def test_equal_hashes_are_equal_tokens_and_others_are_not() -> None:
    rows = trace(line(), "", line(timestamp=500, hash_ids=[7, 8], input_length=1500), line(hash_ids=[7])).rows
    late, early, last = rows[1], rows[0], rows[2]
    assert early.arrival_s == 0.0
    assert late.arrival_s == 0.5
    assert early.prompt[:2] == late.prompt[:2]
    assert [request.num_prompt for request in (early, late, last)] == [1500, 1200, 1200]
    # A whole piece, a piece that is cut, and tokens without a hash are all different.
    assert len({span.stream for row in rows for span in row.prompt}) == 5
    assert len({row.output_stream for row in rows}) == 3


def test_token_ids_share_what_blocks_share() -> None:
    first, second, third = trace(
        {"arrival_s": 0, "prompt_token_ids": [*range(40)], "max_tokens": 3},
        {"arrival_s": 0, "prompt_token_ids": [*range(32), 5, 5], "max_tokens": 3},
        {"arrival_s": 0, "prompt_token_ids": [9, *range(1, 40)], "max_tokens": 3},
    ).rows
    assert first.prompt[:2] == second.prompt[:2]
    assert first.prompt[2] != second.prompt[2]
    assert not set(first.prompt) & set(third.prompt)
    assert second.prompt[-1] == TokenSpan(second.prompt[-1].stream, 0, 2)


def test_times_are_scaled() -> None:
    rows = trace(line(), line(timestamp=3000), time_scale=0.5).rows
    assert [row.arrival_s for row in rows] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("nonsense", "line 2: it is not JSON"),
        ("[1]", "line 2: it must be an object"),
        ("[" * 100000, "line 2"),
        (line(turns=3), "line 2: 'turns' is not a field"),
        (line(timestamp=-1), "line 2: timestamp must be a number of milliseconds"),
        (line(timestamp=True), "line 2: timestamp must be"),
        (line(arrival_s=1), "line 2: there must be one of timestamp, arrival_s, got timestamp and arrival_s"),
        (line(input_length=0), "line 2: input_length must be a whole number"),
        (line(input_length=1 << 40), "line 2: input_length must be a whole number"),
        (line(output_length=2.0), "line 2: output_length must be a whole number"),
        (line(hash_ids=[1, 2, 3, 4]), "line 2: hash_ids must have at most 3 numbers for 1200 tokens"),
        (line(hash_ids=[1, -2]), "line 2: hash_ids must be a list"),
        (line(hash_ids="12"), "line 2: hash_ids must be a list"),
        (line(priority=0.5), "line 2: priority must be a whole number"),
        (
            {"timestamp": 1, "output_length": 1},
            "line 2: there must be one of input_length, prompt_token_ids, got none",
        ),
        ({"timestamp": 1, "prompt_token_ids": [], "output_length": 1}, "line 2: prompt_token_ids must be"),
        (
            {"timestamp": 1, "prompt_token_ids": [1], "hash_ids": [1], "output_length": 1},
            "line 2: hash_ids must not stand beside",
        ),
    ],
)
def test_a_wrong_line_is_named(wrong: object, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        trace(line(), wrong)
    assert str(caught.value).startswith("a.jsonl line 2")


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(TraceError, match=r"a\.jsonl has no requests"):
        trace("", " ")
