"""The scheduler's rules, one test each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.errors import InvalidParameter, InvariantViolation, PromptTooLong
from quire.memory import FullAttention, KVCacheManager, RecurrentState, SlidingWindow, TokenAccount, TokenSources
from quire.memory.prefix.prompt_embeddings import MediaSpan
from quire.scheduling import Scheduler
from quire.scheduling.plan import ItemResult
from quire.sequences import FinishReason, SequenceStatus
from quire.sequences.decoding import Append, Finish
from tests.scheduling.harness import Harness, Job, Setting, finish_all, prompt, run


def test_drafts_leave_room_in_states_only_to_who_copies_one() -> None:
    """A state has the bytes of a hundred blocks: to leave as many states as blocks free would end all drafts."""
    full = FullAttention(block_size=4)
    state = RecurrentState(block_size=4, layer_bytes=100 * full.bytes_per_block)

    def accepted(num_states: int, n: int = 1) -> int:
        num_bytes = num_states * state.bytes_per_block
        harness = Harness(
            Setting(num_bytes=num_bytes, specs=(full, state), drafts="guesser", snapshot_interval=1 << 20)
        )
        for seed in range(4):
            harness.add(Job(prompt=prompt(6, seed), max_tokens=40, n=n, ignore_eos=True), seed=seed)
        finish_all(harness)
        assert harness.scheduler.stats.num_preemptions == 0 or n > 1
        return harness.scheduler.stats.num_accepted_tokens

    assert accepted(12) == accepted(200) > 40, "drafts stop while memory is far from short"
    # Four pairs of samples share a state each until they write: that room is left to them.
    assert accepted(200, n=2) > 80


# ---- budgets and chunks (S2) ----


def test_a_long_prompt_is_computed_in_chunks_and_drawn_from_once() -> None:
    harness = Harness(Setting(budget=8, max_num_seqs=8))
    harness.add(Job(prompt=prompt(20), max_tokens=2, ignore_eos=True), seed=0)
    items = [item for _ in range(4) for item in harness.step().items]
    assert [(item.start, len(item.token_ids), item.num_samples) for item in items] == [
        (0, 8, 0),
        (8, 8, 0),
        (16, 4, 1),
        (20, 1, 1),
    ]
    assert [item.new_sequence is not None for item in items] == [True, False, False, False]


def test_decodes_are_served_before_any_chunk_is_cut() -> None:
    harness = Harness(Setting(budget=4, max_num_seqs=4))
    for seed in range(3):
        harness.add(Job(prompt=prompt(1, seed), max_tokens=20, ignore_eos=True), seed=seed)
    harness.step()
    harness.add(Job(prompt=prompt(10, 9), max_tokens=2, ignore_eos=True), seed=3)
    for start in range(9):
        counts = {item.seq_id: (item.start, len(item.token_ids)) for item in harness.step().items}
        assert counts.pop(3) == (start, 1)
        assert [count for _, count in counts.values()] == [1, 1, 1]


def test_prompts_are_cut_to_the_pace_only_beside_decodes() -> None:
    harness = Harness(Setting(budget=64, max_num_seqs=4, chunk_tokens=5))
    for seed in range(3):
        harness.add(Job(prompt=prompt(30, seed), max_tokens=4, ignore_eos=True), seed=seed)
    assert [len(item.token_ids) for item in harness.step().items] == [30, 30, 4], "nobody decodes yet"
    assert [len(item.token_ids) for item in harness.step().items] == [1, 1, 5]
    harness.add(Job(prompt=prompt(30, 9), max_tokens=2, ignore_eos=True), seed=9)
    assert [len(item.token_ids) for item in harness.step().items] == [1, 1, 5], (
        "an admitted prompt takes the rest of the budget"
    )
    finish_all(harness)


SEEN = MediaSpan(5, 8, b"a picture")


def test_media_that_see_themselves_are_computed_whole() -> None:
    harness = Harness(Setting(budget=12, max_num_seqs=4, chunk_tokens=3))
    job = Job(prompt=prompt(30), media=(SEEN,), media_see_themselves=True, max_tokens=1, ignore_eos=True)
    harness.add(job, seed=0)
    chunks = [(item.start, len(item.token_ids)) for _ in range(4) for item in harness.step().items]
    assert chunks == [(0, 5), (5, 12), (17, 12), (29, 1)]
    # A hit leaves the last token, which is one of the medium's: it goes back to where the medium begins.
    harness.add(replace(job, prompt=prompt(13)), seed=1)
    assert [(item.start, len(item.token_ids)) for item in harness.step().items] == [(5, 8)]
    # Beside a decode, a chunk is as large as the medium.
    harness.add(Job(prompt=prompt(1, 7), max_tokens=20, ignore_eos=True), seed=2)
    harness.step()
    harness.add(replace(job, prompt=prompt(30, 2)), seed=3)
    counts = [len(item.token_ids) for _ in range(5) for item in harness.step().items if item.seq_id == 3]
    assert sum(counts) == 30
    assert (counts[0], max(counts[1:])) == (5, 8)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (Setting(budget=11, max_num_seqs=4), "at most 7 tokens"),
        (Setting(num_blocks=8, specs=(SlidingWindow(block_size=4, window=25),)), "fit into the KV cache whole"),
    ],
)
def test_media_that_no_step_has_whole_are_refused(setting: Setting, words: str) -> None:
    harness = Harness(setting)
    job = Job(prompt=prompt(60), media=(SEEN,), media_see_themselves=True, max_tokens=1)
    with pytest.raises(InvalidParameter, match=words):
        harness.add(job, seed=0)
    harness.add(replace(job, media_see_themselves=False), seed=1)
    finish_all(harness)


def test_a_budget_below_the_slots_is_refused() -> None:
    memory = KVCacheManager([FullAttention(block_size=4)], 4)
    with pytest.raises(ValueError, match="3 tokens a step cannot serve 4 sequences"):
        Scheduler(memory, max_num_seqs=4, max_num_batched_tokens=3)


# ---- order (S6) ----


def first_steps(jobs: list[Job], setting: Setting) -> list[int]:
    """Return the jobs in the order of their first step."""
    harness = Harness(setting)
    requests = [harness.add(job, seed=i) for i, job in enumerate(jobs)]
    order: list[int] = []
    while harness.scheduler.has_unfinished:
        harness.step()
        order += [i for i, r in enumerate(requests) if r.num_cached_tokens is not None and i not in order]
    return order


def test_first_come_first_served_even_where_a_later_request_would_fit() -> None:
    jobs = [Job(prompt=prompt(length), max_tokens=2, ignore_eos=True) for length in (8, 14, 1, 1)]
    assert first_steps(jobs, Setting(num_blocks=4, max_num_seqs=1, budget=16)) == [0, 1, 2, 3]


def test_priority_goes_first_then_arrival() -> None:
    jobs = [Job(prompt=prompt(3), priority=p, max_tokens=2, ignore_eos=True) for p in (2, 1, 0, 1)]
    assert first_steps(jobs, Setting(max_num_seqs=1, budget=16, policy="priority")) == [2, 1, 3, 0]
    assert first_steps(jobs, Setting(max_num_seqs=1, budget=16)) == [0, 1, 2, 3]


def test_the_last_in_order_is_preempted_and_comes_back_first() -> None:
    harness = Harness(Setting(num_blocks=6, budget=16, max_num_seqs=3, caching=False))
    older = harness.add(Job(prompt=prompt(7), max_tokens=14, ignore_eos=True), seed=0)
    younger = harness.add(Job(prompt=prompt(8), max_tokens=14, ignore_eos=True), seed=1)
    harness.add(Job(prompt=prompt(8), max_tokens=14, ignore_eos=True), seed=2)
    while not younger.num_preemptions:
        harness.step()
    assert older.num_preemptions == 0
    assert [sequence.request.seed for sequence in harness.scheduler.waiting] == [1, 2]
    finish_all(harness)
    stats = harness.scheduler.stats
    assert stats.num_preemptions == sum(request.num_preemptions for request in harness.requests) > 0
    assert stats.wasted_tokens > 0
    assert [len(request.sequences[0].output_token_ids) for request in harness.requests] == [14, 14, 14]


# ---- parallel samples ----


def test_a_prompt_with_many_samples_is_computed_once() -> None:
    job = Job(prompt=prompt(10), n=4, max_tokens=6, ignore_eos=True)
    outcome = run([job], Setting(caching=False))
    # The first token of each sample comes from the prompt's own logits; the last is never computed.
    assert outcome.executor.num_computed_tokens == 10 + 4 * 5
    assert len({tuple(tokens) for tokens in outcome.outputs[0]}) > 1
    # 10 tokens in blocks of 4: the two full blocks stay shared, the tail is copied for all samples but the last writer.
    assert outcome.scheduler.memory.usage().num_copies == 3


def test_samples_share_their_prompt_blocks() -> None:
    job = Job(prompt=prompt(16), n=4, max_tokens=4, ignore_eos=True)
    outcome = run([job], Setting(caching=False))
    assert outcome.peak_blocks == 4 + 4
    assert outcome.scheduler.memory.usage().num_copies == 0


def test_slots_are_kept_for_samples_that_are_still_to_fork() -> None:
    harness = Harness(Setting(max_num_seqs=4, budget=8))
    harness.add(Job(prompt=prompt(20), n=3, max_tokens=4, ignore_eos=True), seed=0)
    harness.add(Job(prompt=prompt(4), n=2, max_tokens=4, ignore_eos=True), seed=1)
    while harness.scheduler.waiting:
        assert len(harness.scheduler.running) in (0, 1, 3)
        harness.step()
    finish_all(harness)
    assert [len(request.sequences) for request in harness.requests] == [3, 2]


def test_advance_reports_draws_and_endings_in_order() -> None:
    harness = Harness(Setting())
    request = harness.add(Job(prompt=prompt(3), n=2, max_tokens=1, ignore_eos=True), seed=0)
    plan = harness.plan()
    results = [ItemResult(0, (5, 6))]
    events = harness.scheduler.update_from_results(plan.items, results)
    first, second = request.sequences
    assert events == [
        (0, first, Append(0, 0), 4),
        (0, second, Append(1, 1), 4),
        (0, first, Finish(0, FinishReason.LENGTH, None), 4),
        (0, second, Finish(1, FinishReason.LENGTH, None), 4),
    ]
    assert (first.output_token_ids, second.output_token_ids) == ([5], [6])
    assert harness.scheduler.requests == {}
    assert harness.scheduler.update_from_results(plan.items, results) == [], (
        "a sequence that ended takes no more tokens"
    )


# ---- prefixes ----


def test_the_second_of_two_equal_prompts_is_computed_from_its_hit_on() -> None:
    harness = Harness(Setting())
    job = Job(prompt=prompt(12), max_tokens=2, ignore_eos=True)
    first = harness.add(job, seed=0)
    harness.step()
    second = harness.add(job, seed=1)
    plan = harness.step()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 11)
    assert [(item.start, len(item.token_ids)) for item in plan.items] == [(12, 1), (11, 1)]
    stats = harness.scheduler.stats
    assert (stats.prefix_queries, stats.prefix_hits) == (24, 11)
    assert stats.first_time.sources == TokenSources(device=8, copied=3, computed=13)
    reasons = stats.first_time.by_reason()
    assert {name: count for name, count in reasons.items() if count} == {"not_cached": 11, "last_token": 2}
    assert stats.resumed == TokenAccount()


def test_equal_prompts_in_one_step_merge_when_they_fill() -> None:
    harness = Harness(Setting())
    for seed in range(3):
        harness.add(Job(prompt=prompt(12), max_tokens=2, ignore_eos=True), seed=seed)
    harness.step()
    usage = harness.memory.usage()
    assert (usage.used, usage.num_merges) == (3, 6)


def test_prompt_logprobs_suppress_the_hit_until_they_are_known() -> None:
    harness = Harness(Setting(num_blocks=8, budget=16, max_num_seqs=4))
    harness.add(Job(prompt=prompt(12), max_tokens=2, ignore_eos=True), seed=0)
    harness.step()
    wanting = harness.add(Job(prompt=prompt(12), max_tokens=9, prompt_logprobs=0, ignore_eos=True), seed=1)
    harness.step()
    assert wanting.num_cached_tokens == 0
    assert wanting.num_known_prompt_logprobs == 11
    assert wanting.hit_limit is None, "all are known: after a preemption the whole prompt may be hit"


def test_tenants_with_different_salts_share_nothing() -> None:
    harness = Harness(Setting())
    for seed, salt in enumerate((None, "a", "b", "a")):
        harness.add(Job(prompt=prompt(9), max_tokens=1, cache_salt=salt, ignore_eos=True), seed=seed)
        harness.step()
    assert [request.num_cached_tokens for request in harness.requests] == [0, 0, 0, 8]


# ---- refusals and endings ----


def test_what_can_never_fit_is_refused_at_the_door() -> None:
    harness = Harness(Setting(num_blocks=4))
    harness.add(Job(prompt=prompt(12), max_tokens=4, ignore_eos=True), seed=0)
    with pytest.raises(PromptTooLong) as caught:
        harness.add(Job(prompt=prompt(14), max_tokens=3), seed=1)
    assert (caught.value.num_tokens, caught.value.limit, caught.value.field) == (14, 13, "prompt")
    finish_all(harness)
    assert len(harness.requests[0].sequences[0].output_token_ids) == 4


@pytest.mark.parametrize(("max_tokens", "limit"), [(16, 0), (400, 0), (5, 11)])
def test_the_refusal_names_the_longest_prompt_that_would_do(max_tokens: int, limit: int) -> None:
    harness = Harness(Setting(num_blocks=4))
    with pytest.raises(PromptTooLong, match=f"at most {limit}$"):
        harness.add(Job(prompt=prompt(12), max_tokens=max_tokens), seed=0)
    if limit:
        harness.add(Job(prompt=prompt(limit), max_tokens=max_tokens), seed=1)
        finish_all(harness)


@pytest.mark.parametrize("num_tokens", [6, 9, 30])
def test_beams_in_a_window_may_fit_where_those_of_a_shorter_prompt_do_not(num_tokens: int) -> None:
    """Behind a prompt that ends with a block, each beam begins one of its own, beside those in the window."""
    setting = Setting(num_blocks=3, block_size=3, caching=False, specs=(SlidingWindow(block_size=3, window=5),))
    harness = Harness(setting)
    with pytest.raises(PromptTooLong, match=f"at most {num_tokens - 1}$"):
        harness.add(Job(prompt=prompt(num_tokens), beam_width=2, max_tokens=1), seed=0)
    for seed, length in ((1, num_tokens - 1), (2, num_tokens + 1)):
        harness.add(Job(prompt=prompt(length), beam_width=2, max_tokens=1), seed=seed)
    finish_all(harness)


def test_more_samples_than_slots_are_refused_at_the_door() -> None:
    harness = Harness(Setting(max_num_seqs=3, budget=8))
    with pytest.raises(InvalidParameter, match=r"n must be at most max_num_seqs \(3\), got 4"):
        harness.add(Job(prompt=prompt(3), n=4), seed=0)
    harness.add(Job(prompt=prompt(3), n=3), seed=1)
    finish_all(harness)


def test_a_request_id_in_use_is_refused() -> None:
    harness = Harness(Setting())
    harness.add(Job(prompt=prompt(3)), seed=0)
    with pytest.raises(ValueError, match="job 0"):
        harness.add(Job(prompt=prompt(3)), seed=0)


def test_a_prompt_with_samples_to_come_can_be_finished_early() -> None:
    harness = Harness(Setting(max_num_seqs=2, budget=8))
    request = harness.add(Job(prompt=prompt(20), n=2), seed=0)
    harness.step()
    harness.scheduler.finish_at_stop_string(request.sequences[0], "a stop string")
    assert harness.scheduler.requests == {}
    assert harness.memory.usage().used == 0


def test_a_prompt_beyond_its_own_limit_is_refused_at_the_door() -> None:
    harness = Harness(Setting())
    request = harness.add(Job(prompt=prompt(3)), seed=0)
    beyond = replace(request, request_id="beyond", max_total_tokens=3, sequences=[])
    with pytest.raises(ValueError, match="3 prompt tokens leave no room within 3"):
        harness.scheduler.add(beyond)
    finish_all(harness)


def test_abort_in_every_state() -> None:
    harness = Harness(Setting(max_num_seqs=2, budget=8))
    requests = [harness.add(Job(prompt=prompt(12), n=n, ignore_eos=True), seed=i) for i, n in enumerate((2, 1, 1))]
    assert harness.scheduler.abort("unknown") == []
    harness.step()
    assert [s.status for s in requests[0].sequences] == [SequenceStatus.RUNNING]
    (ended,) = harness.scheduler.abort("job 0", FinishReason.ERROR)
    assert (ended.finish_reason, ended.is_finished) == (FinishReason.ERROR, True)
    assert harness.scheduler.abort("job 0") == [], "an abort is final"
    harness.audit()
    (waiting,) = harness.scheduler.abort("job 1")
    assert waiting.finish_reason is FinishReason.ABORT
    plan = harness.plan()
    assert plan.finished_ids == (ended.seq_id,)
    assert [item.seq_id for item in plan.items] == [requests[2].sequences[0].seq_id]
    harness.abort(requests[2])
    harness.finish_step(plan)
    assert requests[2].sequences[0].output_token_ids == []
    assert not harness.scheduler.has_unfinished
    assert harness.memory.usage().used == 0


def test_aborting_one_of_several_samples_ends_those_that_live() -> None:
    harness = Harness(Setting())
    request = harness.add(Job(prompt=prompt(3), n=3, max_tokens=9, ignore_eos=True), seed=0)
    harness.step()
    harness.scheduler.finish_at_stop_string(request.sequences[1], "a stop string")
    assert request.sequences[1].stop_reason == "a stop string"
    assert [sequence.sample_idx for sequence in harness.scheduler.abort("job 0")] == [0, 2]


def test_end_tokens_wait_for_min_tokens() -> None:
    jobs = [Job(prompt=(seed,), max_tokens=30, min_tokens=6, stop_token_ids=(3, 4, 5, 6)) for seed in range(12)]
    outcome = run(jobs, Setting())
    lengths = [len(samples[0]) for samples in outcome.outputs]
    assert min(lengths) == 7
    for request, (tokens,) in zip(outcome.requests, outcome.outputs, strict=True):
        sequence = request.sequences[0]
        assert not set(tokens[:6]) & {3, 4, 5, 6, 12}
        assert sequence.finish_reason is FinishReason.STOP
        assert sequence.stop_reason == (None if tokens[-1] == 12 else tokens[-1])


# ---- broken promises of memory are our own bugs ----


def test_a_sequence_that_could_never_be_admitted_is_a_violation() -> None:
    harness = Harness(Setting(num_blocks=4))
    request = harness.add(Job(prompt=prompt(12), max_tokens=4), seed=0)
    request.sequences[0].tokens.extend(prompt(12))
    with pytest.raises(InvariantViolation, match="S3"):
        harness.plan()


def test_a_promise_that_memory_breaks_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Setting(num_blocks=4))
    harness.add(Job(prompt=prompt(12), max_tokens=4), seed=0)
    monkeypatch.setattr(KVCacheManager, "append_slots", lambda *_, **__: 0)
    with pytest.raises(InvariantViolation, match="S2"):
        harness.plan()


def test_nobody_able_to_grow_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(Setting(num_blocks=4))
    harness.add(Job(prompt=prompt(12), max_tokens=4, ignore_eos=True), seed=0)
    harness.step()
    monkeypatch.setattr(KVCacheManager, "append_slots", lambda *_, **__: 0)
    with pytest.raises(InvariantViolation, match="S3"):
        harness.plan()


def test_an_idle_scheduler_plans_nothing_and_keeps_closings() -> None:
    harness = Harness(Setting())
    first = harness.add(Job(prompt=prompt(3), max_tokens=1), seed=0)
    harness.step()
    for _ in range(2):
        plan = harness.plan()
        assert (plan.items, plan.finished_ids, plan.ops.copies) == ((), (), ())
    harness.add(Job(prompt=prompt(3), max_tokens=1), seed=1)
    assert harness.step().finished_ids == (first.sequences[0].seq_id,)
