"""Preemption: the victims, swapping and recomputation, and all samples of a request together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.errors import InvariantViolation
from quire.memory import FullAttention, KVCacheManager, MemoryOps, RecurrentState, Tier
from quire.memory.capacity_queries import CapacityQueries
from quire.memory.results import AllocStatus, Verdict
from quire.scheduling import TransferRates
from quire.scheduling.preemption import PreemptionCost
from quire.sequences import FinishReason, Request, SequenceStatus
from tests.scheduling.harness import Harness, Job, Setting, finish_all, outputs_of, prompt

TIGHT = Setting(num_blocks=8, budget=16, max_num_seqs=4, host_blocks=20, preemption_mode="swap", caching=False)


def job(length: int, max_tokens: int, n: int = 1) -> Job:
    return Job(prompt=prompt(length), max_tokens=max_tokens, n=n, ignore_eos=True)


def step_until_swapped(harness: Harness) -> None:
    while not harness.scheduler.swapped:
        assert harness.scheduler.has_unfinished, "nobody was swapped out"
        harness.step()


def two_that_collide(setting: Setting = TIGHT) -> tuple[Harness, Request, Request]:
    """Two sequences that fit side by side at first, and not to their ends."""
    harness = Harness(setting)
    return harness, harness.add(job(11, 16), seed=0), harness.add(job(10, 16), seed=1)


def test_a_swapped_sequence_goes_on_where_it_stopped_and_opens_once() -> None:
    harness, older, younger = two_that_collide()
    harness.step()
    step_until_swapped(harness)
    (sequence,) = younger.sequences
    assert sequence.status is SequenceStatus.SWAPPED
    stopped_at = sequence.num_computed
    assert stopped_at > 10
    items = []
    while harness.scheduler.has_unfinished:
        items += [item for item in harness.step().items if item.seq_id == sequence.seq_id]
    assert items[0].start == stopped_at
    assert items[0].new_sequence is None, "the data plane has kept it open"
    assert [delta.start for delta in items[0].table_deltas] == [0], "its table comes whole"
    stats = harness.scheduler.stats
    assert (stats.num_preemptions, stats.num_swaps, stats.wasted_tokens) == (1, 1, 0)
    assert (older.num_preemptions, younger.num_preemptions) == (0, 1)
    assert stats.resumed_queries == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_the_watermark_starts_no_preemption(mode: str) -> None:
    """It is for admissions: running sequences grow into it, down to the last block."""
    harness = Harness(replace(TIGHT, watermark=3, preemption_mode=mode))
    for seed in range(2):
        harness.add(job(3, 13), seed=seed)
    least = TIGHT.num_blocks
    while harness.scheduler.has_unfinished:
        harness.step()
        least = min(least, harness.memory.arena.available_blocks([0])[0])
    assert least == 0
    assert harness.scheduler.stats.num_preemptions == 0


def test_swapping_is_one_ordered_list_of_copies_there_and_back() -> None:
    harness, _, younger = two_that_collide()
    copies: list[Any] = []
    while harness.scheduler.has_unfinished:
        copies += harness.step().ops.copies
    tiers = [(copy.src_tier, copy.dst_tier) for copy in copies]
    out, back = (Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)
    assert set(tiers) == {out, back}
    assert tiers == sorted(tiers), "all go out before any comes back"
    assert tiers.count(out) == tiers.count(back) == 4
    assert younger.num_preemptions == 1


def test_a_family_is_swapped_as_one_and_shares_when_it_is_back() -> None:
    harness = Harness(replace(TIGHT, num_blocks=10))
    harness.add(job(15, 14), seed=0)
    family = harness.add(job(9, 14, n=2), seed=1)
    harness.step()
    step_until_swapped(harness)
    assert [sequence.status for sequence in family.sequences] == [SequenceStatus.SWAPPED] * 2
    assert family.num_preemptions == 2
    while harness.scheduler.swapped:
        harness.step()
    first, second = (harness.memory.block_table(sequence.seq_id) for sequence in family.sequences)
    assert first[:2] == second[:2], "the prompt's full blocks"
    assert not set(first[2:]) & set(second[2:])
    finish_all(harness)


def test_a_sample_whose_family_grows_recomputes() -> None:
    harness = Harness(replace(TIGHT, num_blocks=7))
    family = harness.add(job(8, 16, n=2), seed=0)
    while not harness.scheduler.stats.num_preemptions:
        harness.step()
    assert [sequence.status for sequence in family.sequences] == [SequenceStatus.RUNNING, SequenceStatus.WAITING]
    assert harness.scheduler.stats.num_swaps == 0
    finish_all(harness)


def test_a_host_without_room_means_recomputing() -> None:
    harness, _, younger = two_that_collide(replace(TIGHT, host_blocks=2))
    finish_all(harness)
    assert younger.num_preemptions > 0
    assert harness.scheduler.stats.num_swaps == 0
    assert harness.scheduler.stats.wasted_tokens > 0


def test_recompute_mode_leaves_the_host_to_evicted_blocks() -> None:
    harness, _, younger = two_that_collide(replace(TIGHT, preemption_mode="recompute"))
    finish_all(harness)
    assert younger.num_preemptions > 0
    assert harness.scheduler.stats.num_swaps == 0


@pytest.mark.parametrize(("copy_bytes_per_s", "is_swap"), [(1e12, True), (1.0, False)])
def test_auto_takes_what_costs_less(copy_bytes_per_s: float, is_swap: bool) -> None:
    harness, _, younger = two_that_collide(replace(TIGHT, preemption_mode="auto"))
    harness.scheduler.preemption.rates = TransferRates(copy_bytes_per_s, prefill_tokens_per_s=1000.0)
    while not younger.num_preemptions:
        harness.step()
    status = SequenceStatus.SWAPPED if is_swap else SequenceStatus.WAITING
    assert younger.sequences[0].status is status
    finish_all(harness)


def test_nobody_is_let_in_past_a_swapped_sequence() -> None:
    harness, _, younger = two_that_collide()
    harness.step()
    step_until_swapped(harness)
    later = harness.add(job(1, 2), seed=2)
    while younger.sequences[0].status is SequenceStatus.SWAPPED:
        assert later.sequences[0].status is SequenceStatus.WAITING, "it would have fitted"
        harness.step()
    finish_all(harness)


def test_who_comes_earlier_is_let_in_before_a_swapped_sequence() -> None:
    harness, _, younger = two_that_collide(replace(TIGHT, policy="priority"))
    harness.step()
    step_until_swapped(harness)
    urgent = harness.add(replace(job(1, 2), priority=-1), seed=2)
    finish_all(harness)
    assert urgent.sequences[0].finish_reason is FinishReason.LENGTH
    assert younger.sequences[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_executed", [True, False], ids=["copied", "copies pending"])
def test_an_abort_while_swapped_frees_both_tiers(is_executed: bool) -> None:
    harness, older, younger = two_that_collide()
    harness.step()
    while True:
        plan = harness.plan()
        if harness.scheduler.swapped:
            break
        harness.finish_step(plan)
    if is_executed:
        harness.finish_step(plan)
    harness.abort(younger)
    host = harness.memory.usage().host
    assert host is not None
    assert (host.used, host.num_sequences) == (0, 0)
    assert not harness.scheduler.swapped
    if not is_executed:
        harness.finish_step(plan)
    assert younger.sequences[0].seq_id in harness.step().finished_ids
    assert older.sequences[0].status is SequenceStatus.RUNNING
    finish_all(harness)


@pytest.mark.parametrize("num_fitting", [0, 1])
def test_a_request_too_large_to_swap_in_recomputes_its_last_samples(
    num_fitting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fitted when it was swapped out always fits again; memory is made to say otherwise."""
    harness = Harness(replace(TIGHT, num_blocks=10))
    harness.add(job(15, 14), seed=0)
    family = harness.add(job(9, 14, n=2), seed=1)
    harness.step()
    step_until_swapped(harness)
    can_swap_in = harness.memory.capacity.can_swap_in

    def can_only_swap_in_few(seq_ids: list[int], *args: Any) -> AllocStatus:
        status = can_swap_in(seq_ids, *args)
        return status if len(seq_ids) <= num_fitting else status._replace(verdict=Verdict.LATER)

    monkeypatch.setattr(CapacityQueries, "can_swap_in", staticmethod(can_only_swap_in_few))
    ids, num_openings = {sequence.seq_id for sequence in family.sequences}, 0
    stats = harness.scheduler.stats
    num_lost = stats.num_preemptions - stats.num_swaps
    while harness.scheduler.has_unfinished:
        num_openings += sum(item.new_sequence is not None and item.seq_id in ids for item in harness.step().items)
    assert num_openings == 2 - num_fitting + (stats.num_preemptions - stats.num_swaps) - num_lost
    finish_all(harness)
    alone = Harness(Setting())
    expected = alone.add(job(9, 14, n=2), seed=1)
    finish_all(alone)
    assert [s.output_token_ids for s in family.sequences] == [s.output_token_ids for s in expected.sequences]


def test_a_loss_that_frees_nothing_is_the_worst() -> None:
    assert PreemptionCost((), False, 1.0, 0).waste == float("inf")
    assert PreemptionCost((), False, 3.0, 6).waste == 0.5


def test_least_waste_spares_who_would_lose_much_for_little() -> None:
    """The last in order would lose all of its tokens; the one before it shares all but its tail with the first."""
    setting = Setting(num_blocks=11, budget=64, max_num_seqs=4, preemption_policy="least_waste")
    harness = Harness(setting)
    harness.add(Job(prompt=prompt(19, 2), max_tokens=9, ignore_eos=True), seed=0)
    harness.step()
    sharing = harness.add(Job(prompt=prompt(17, 2), max_tokens=9, ignore_eos=True), seed=1)
    alone = harness.add(Job(prompt=prompt(17, 3), max_tokens=9, ignore_eos=True), seed=2)
    while not harness.scheduler.stats.num_preemptions:
        harness.step()
    assert (sharing.num_preemptions, alone.num_preemptions) == (1, 0)
    finish_all(harness)


@pytest.mark.parametrize("lost", [(Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)], ids=["out", "in"])
def test_a_copy_that_is_not_made_is_noticed(lost: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    harness, _, _ = two_that_collide()
    take_ops = KVCacheManager.take_ops

    def take_fewer(memory: KVCacheManager) -> MemoryOps:
        copies = take_ops(memory).copies
        return MemoryOps(tuple(copy for copy in copies if (copy.src_tier, copy.dst_tier) != lost))

    monkeypatch.setattr(KVCacheManager, "take_ops", take_fewer)
    with pytest.raises(InvariantViolation, match="M5"):
        finish_all(harness)


@pytest.mark.parametrize("status", [SequenceStatus.WAITING, SequenceStatus.FINISHED])
def test_who_is_out_cannot_be_swapped_out(status: SequenceStatus) -> None:
    request = Harness(Setting()).add(job(3, 2), seed=0)
    if status is SequenceStatus.FINISHED:
        request.sequences[0].move_to(status)
    with pytest.raises(InvariantViolation, match=f"S5.*{status.value} to swapped"):
        request.sequences[0].move_to(SequenceStatus.SWAPPED)


# ---- what memory says of a release ----


def test_a_release_counts_what_nobody_else_holds() -> None:
    memory = KVCacheManager([FullAttention(block_size=4)], 20)
    block_bytes = memory.groups[0].spec.bytes_per_block
    tokens = list(range(10))
    chain = memory.chain(tokens, Harness(Setting()).add(job(1, 1), seed=0).namespace)
    memory.allocate(1, chain, memory.match_prefix(chain))
    assert memory.append_slots((1,), 10)
    memory.publish(1, 10)
    assert memory.capacity.would_release([1]) == (3 * block_bytes, 10)
    copy = tokens.copy()
    memory.fork(1, 2, copy)
    assert memory.capacity.would_release([1]) == (0, 0), "the child keeps it all"
    assert memory.capacity.would_release([1, 2]) == (3 * block_bytes, 20)
    copy.append(5)
    assert memory.append_slots((2,), 1)
    memory.publish(2, 11)
    assert memory.capacity.would_release([2]) == (block_bytes, 3), "the copied tail: tokens 8, 9 and 10"


def test_a_release_of_a_state_loses_all_that_it_sums_up() -> None:
    state = RecurrentState(block_size=4, layer_bytes=FullAttention(block_size=4).bytes_per_block)
    memory = KVCacheManager([FullAttention(block_size=4), state], 20)
    block_bytes = state.bytes_per_block
    tokens = list(range(10))
    chain = memory.chain(tokens, Harness(Setting()).add(job(1, 1), seed=0).namespace)
    memory.allocate(1, chain, memory.match_prefix(chain))
    for length in (8, 10):
        assert memory.append_slots((1,), length - memory.sequences[1].num_slots)
        memory.publish(1, length)
    assert memory.capacity.would_release([1]) == (4 * block_bytes, 10)
    copy = tokens.copy()
    memory.fork(1, 2, copy)
    assert memory.capacity.would_release([1]) == (0, 0), "the child keeps it all"
    copy.append(5)
    assert memory.append_slots((2,), 1)
    memory.publish(2, 11)
    assert memory.capacity.would_release([2]) == (2 * block_bytes, 11), "the copied tail, and the state"


# ---- searches ----


def search(length: int, max_tokens: int) -> Job:
    return replace(job(length, max_tokens), beam_width=3, n=3)


def two_searches_that_collide(setting: Setting) -> tuple[Harness, Request, Request]:
    """Two searches that fit side by side at first, and not to their ends."""
    harness = Harness(setting)
    return harness, harness.add(search(9, 14), seed=0), harness.add(search(9, 14), seed=1)


SEARCHING = replace(TIGHT, num_blocks=16, max_num_seqs=8)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_beams_lose_their_memory_all_together(mode: str) -> None:
    harness, older, younger = two_searches_that_collide(replace(SEARCHING, preemption_mode=mode))
    while not harness.scheduler.stats.num_preemptions:
        harness.step()
    assert [beam.status for beam in older.unfinished] == [SequenceStatus.RUNNING] * 3
    if mode == "swap":
        assert [beam.status for beam in younger.unfinished] == [SequenceStatus.SWAPPED] * 3
        assert harness.scheduler.stats.wasted_tokens == 0
    else:
        (again,) = younger.sequences
        assert (again.status, again.tokens) == (SequenceStatus.WAITING, younger.prompt_token_ids)
        # Its prompt, and the token of each of three beams in all steps but the first.
        assert harness.scheduler.stats.wasted_tokens >= 9 + 3
        assert (harness.scheduler.stats.wasted_tokens - 9) % 3 == 0
    assert younger.num_preemptions == harness.scheduler.stats.num_preemptions == 3
    finish_all(harness)
    for request in (older, younger):
        alone = Harness(Setting())
        expected = alone.add(search(9, 14), seed=request.seed)
        finish_all(alone)
        assert outputs_of(request) == outputs_of(expected)


def test_a_search_that_fits_no_more_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fitted when it was swapped out always fits again; memory is made to say otherwise."""
    harness, older, younger = two_searches_that_collide(SEARCHING)
    step_until_swapped(harness)
    lost = set(harness.scheduler.swapped)
    can_swap_in = harness.memory.capacity.can_swap_in
    later = Verdict.LATER
    monkeypatch.setattr(
        CapacityQueries, "can_swap_in", staticmethod(lambda *args: can_swap_in(*args)._replace(verdict=later))
    )
    while not older.is_finished:
        harness.step()
    finish_all(harness)
    assert all(beam.finish_reason is FinishReason.DROPPED for beam in lost)
    alone = Harness(Setting())
    expected = alone.add(search(9, 14), seed=1)
    finish_all(alone)
    assert outputs_of(younger) == outputs_of(expected)


def test_places_are_kept_for_beams_that_are_to_come() -> None:
    """A search whose prompt is computed takes all its seats: nobody takes those of its beams meanwhile."""
    harness = Harness(Setting(max_num_seqs=4, budget=8))
    first = harness.add(search(20, 4), seed=0)
    second = harness.add(job(4, 4, n=2), seed=1)
    while not first.unfinished[0].is_beam:
        harness.step()
        assert [sequence.status for sequence in second.sequences] == [SequenceStatus.WAITING]
    assert len(harness.scheduler.running) == 3
    finish_all(harness)


def test_a_search_that_is_aborted_holds_nothing_wherever_its_beams_are() -> None:
    harness, older, younger = two_searches_that_collide(SEARCHING)
    step_until_swapped(harness)
    ended = harness.scheduler.abort(younger.request_id)
    assert [(beam.finish_reason, beam.status) for beam in ended] == [(FinishReason.ABORT, SequenceStatus.FINISHED)] * 3
    harness.abort(older)
    assert not harness.scheduler.has_unfinished
    assert harness.memory.usage().used == 0
