"""The time for which the other end of a channel is silent."""

from __future__ import annotations

from quire.server.fronts.heartbeat import PING_INTERVAL_S, Silence


def test_silence_counts_from_the_last_answer() -> None:
    now_s = 100.0
    silence = Silence(lambda: now_s)
    for seconds in (1.0, 2.0, 3.0):
        now_s += PING_INTERVAL_S
        assert silence.tick() == seconds * PING_INTERVAL_S
    silence.end()
    assert silence.seconds == 0.0
    now_s += PING_INTERVAL_S
    assert silence.tick() == PING_INTERVAL_S


def test_time_in_which_this_process_did_not_run_is_no_silence_of_the_other() -> None:
    now_s = 100.0
    silence = Silence(lambda: now_s)
    now_s += 3600.0
    assert silence.tick() == 2 * PING_INTERVAL_S
