"""The order of batches: gaps, replays, restarts."""

from __future__ import annotations

from quire.fleet.routing.feed import EventFeed, FeedState, FeedStep
from quire.memory.kv_events import AllBlocksCleared, BlockRemoved, KVEvent

SOME = [BlockRemoved((1,), "GPU")]
ALL: list[KVEvent] = [AllBlocksCleared(), *SOME]


def test_the_first_batch_begins_with_an_empty_cache() -> None:
    feed = EventFeed()
    assert feed.accept(0, SOME) is FeedStep.RESTART
    assert feed.accept(1, SOME) is FeedStep.APPLY
    assert feed.state is FeedState.SYNCED


def test_a_late_consumer_sees_a_gap_until_it_has_the_batches_before() -> None:
    feed = EventFeed()
    assert feed.accept(2, SOME) is FeedStep.IGNORE
    assert feed.state is FeedState.GAP
    steps = [feed.accept(seq, SOME, is_replay=True) for seq in range(3)]
    assert steps == [FeedStep.RESTART, FeedStep.APPLY, FeedStep.APPLY]
    assert feed.accept(3, SOME) is FeedStep.APPLY


def test_a_lost_batch_is_a_gap_until_it_is_replayed() -> None:
    feed = EventFeed()
    feed.accept(0, SOME)
    assert feed.accept(2, SOME) is FeedStep.IGNORE
    assert (feed.state, feed.next_seq, feed.num_gaps) == (FeedState.GAP, 1, 1)
    assert feed.accept(3, SOME) is FeedStep.IGNORE
    assert feed.num_gaps == 1
    assert [feed.accept(seq, SOME, is_replay=True) for seq in (1, 2, 3)] == [FeedStep.APPLY] * 3
    assert feed.state is FeedState.SYNCED


def test_a_replayed_batch_that_arrives_late_is_ignored() -> None:
    feed = EventFeed()
    feed.accept(0, SOME)
    feed.accept(2, SOME)
    for seq in (1, 2, 3):
        feed.accept(seq, SOME, is_replay=True)
    assert feed.accept(3, SOME) is FeedStep.IGNORE
    assert (feed.state, feed.next_seq) == (FeedState.SYNCED, 4)


def test_all_blocks_close_any_gap() -> None:
    feed = EventFeed()
    feed.accept(0, SOME)
    feed.accept(7, SOME)
    assert feed.accept(9, ALL) is FeedStep.RESTART
    assert (feed.state, feed.next_seq) == (FeedState.SYNCED, 10)


def test_a_publisher_that_was_started_again_is_noticed() -> None:
    feed = EventFeed()
    for seq in range(5):
        feed.accept(seq, SOME)
    assert feed.accept(0, SOME) is FeedStep.RESTART
    assert feed.next_seq == 1


def test_a_publisher_that_was_started_again_is_noticed_though_its_first_batch_was_lost() -> None:
    feed = EventFeed()
    for seq in range(5):
        feed.accept(seq, SOME)
    assert feed.accept(1, SOME) is FeedStep.IGNORE
    assert (feed.state, feed.next_seq) == (FeedState.GAP, 0)
    assert feed.accept(0, SOME, is_replay=True) is FeedStep.RESTART
