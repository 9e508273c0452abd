"""Connections between ranks: facts, errors, and ends of processes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from quire.distributed.links import RankLinks, error_from_json, error_to_json
from quire.errors import ConfigError, LockstepDrift, QuireError, RankFailed, UnsupportedModel, WorkerError

WAIT_S = 30.0


@pytest.fixture
def three() -> Iterator[list[RankLinks]]:
    """Return the links of three ranks."""
    pairs = [socket.socketpair() for _ in range(2)]
    leader = RankLinks(0, {rank: pair[0] for rank, pair in enumerate(pairs, 1)}, lambda rank: f"was lost ({rank})")
    links = [leader, *(RankLinks(rank, {0: pair[1]}) for rank, pair in enumerate(pairs, 1))]
    yield links
    for each in links:
        each.close()


def test_facts_come_in_order(three: list[RankLinks]) -> None:
    leader, first, second = three
    for fact in ({"a": [1, None]}, "text", 3):
        leader.send_fact(1, fact)
    assert [first.receive_fact(0, WAIT_S) for _ in range(3)] == [{"a": [1, None]}, "text", 3]
    second.send_fact(0, "second")
    first.send_fact(0, "first")
    assert leader.receive_fact(1, WAIT_S) == "first"
    assert leader.receive_fact(2, WAIT_S) == "second"
    with pytest.raises(RankFailed, match="rank 2 did not answer within 0 s"):
        leader.receive_fact(2, 0.0)


def test_the_end_of_a_rank_is_known_to_all(three: list[RankLinks]) -> None:
    leader, first, second = three
    called: list[WorkerError | ConfigError] = []
    second.on_failure = called.append
    first.close()
    for links in (leader, second):
        failure = links.wait_for_failure(WAIT_S)
        assert isinstance(failure, RankFailed)
        assert str(failure) == "rank 1 was lost (1); all ranks of the model end"
        with pytest.raises(RankFailed):
            links.check()
    assert [error.rank for error in called if isinstance(error, RankFailed)] == [1]


def test_the_end_of_the_leader_is_known(three: list[RankLinks]) -> None:
    leader, first, second = three
    leader.close()
    for links in (first, second):
        failure = links.wait_for_failure(WAIT_S)
        assert isinstance(failure, RankFailed)
        assert failure.rank == 0


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (LockstepDrift("other plan"), "^other plan$"),
        (ConfigError("bad option", field="x"), "^rank 1: bad option$"),
        (MemoryError("no memory"), "rank 1 failed: MemoryError: no memory"),
    ],
)
def test_an_error_of_a_rank_is_that_of_all(error: BaseException, match: str, three: list[RankLinks]) -> None:
    leader, first, second = three
    first.report(error)
    for links in (leader, second):
        failure = links.wait_for_failure(WAIT_S)
        assert failure is not None
        with pytest.raises((WorkerError, ConfigError), match=match):
            raise failure


def test_ends_that_are_expected_are_no_failures(three: list[RankLinks]) -> None:
    leader, first, second = three
    leader.expect_end()
    first.close()
    second.close()
    leader.wait_for_end(WAIT_S)
    assert leader.failure is None


def test_a_wait_for_a_fact_ends_with_a_failure(three: list[RankLinks]) -> None:
    leader, first, _ = three
    threading.Timer(0.05, first.close).start()
    with pytest.raises(RankFailed, match="rank 1 was lost"):
        leader.receive_fact(2, WAIT_S)


@pytest.mark.parametrize(
    "error",
    [
        RankFailed(3, "was killed"),
        LockstepDrift("a"),
        ConfigError("b", field="f"),
        UnsupportedModel("c"),
        ValueError("d"),
    ],
)
def test_errors_come_back(error: BaseException) -> None:
    back = error_from_json(error_to_json(error))
    assert isinstance(back, QuireError)
    assert str(error) in str(back)
    if isinstance(error, QuireError):
        assert type(back) is type(error)
        assert getattr(back, "field", None) == getattr(error, "field", None)


def test_ranks_agree_on_what_rank_0_makes_of_their_facts(three: list[RankLinks]) -> None:
    results: dict[int, int] = {}

    def work(rank: int) -> None:
        results[rank] = three[rank].agree([rank], lambda facts: facts.index([2]) + len(facts), WAIT_S)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == dict.fromkeys(range(3), 5)
