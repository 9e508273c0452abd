"""Tokens of simulated requests."""

from __future__ import annotations

from quire.measurement.simulation.replicas.tokens import FIRST_ID, TokenSpan, TokenTable, num_tokens


def test_streams_differ_in_their_first_token_and_spans_join() -> None:
    table = TokenTable(4)
    whole = table.token_ids([TokenSpan(7, 0, 50)])
    assert whole[0] == FIRST_ID + 7
    assert table.token_ids([TokenSpan(7, 0, 20), TokenSpan(7, 20, 50)]) == whole
    other = table.token_ids([TokenSpan(8, 0, 50)])
    assert other[0] != whole[0]
    assert [table.token_at(7, position) for position in range(50)] == whole


def test_an_empty_span_has_no_tokens() -> None:
    assert TokenTable().token_ids([TokenSpan(7, 0, 0), TokenSpan(8, 0, 2)]) == [FIRST_ID + 8, 1]
    assert num_tokens([TokenSpan(7, 0, 0), TokenSpan(8, 3, 5)]) == 2
