"""A second scheduler that repeats the log of a first one plans the same steps and has the same block tables."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidParameter, LockstepDrift, PromptTooLong, UnsupportedFeature
from quire.memory import MediaSpan
from quire.memory.prefix.token_chain import Namespace
from quire.scheduling import Scheduler, StepPlan
from quire.scheduling.command_log import CommandLog, CommandReplay, CommandStream
from quire.scheduling.log_messages import Command, decode
from quire.scheduling.preemption import TransferRates
from quire.sequences import Request, SamplingParams
from quire.sequences.decoding.lookup import PromptLookup
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.media import Media
from quire.sequences.params import RequestOutputKind
from quire.sequences.pooling import Pooling
from quire.sequences.request_json import request_from_json, request_to_json
from quire.sequences.structured import StructuredOutputs
from quire.sequences.thinking import ThinkingTokens
from tests.scheduling.harness import NEVER, Harness, Job, Setting
from tests.scheduling.random_jobs import jobs, narrow_settings, samples


class Pair:
    """A harness whose scheduler is logged, and a scheduler that repeats the log as it is sent."""

    def __init__(self, setting: Setting, *, has_drafts: bool = False, digest_interval: int = 1) -> None:
        self.leader = Harness(setting, is_audited=False)
        self.follower = Harness(setting, is_audited=False).scheduler
        if has_drafts:
            for scheduler in (self.leader.scheduler, self.follower):
                scheduler.drafts.drafter = AdaptiveDrafter(PromptLookup(1, 4), 4)
        if setting.drafts:  # how many there are is guessed from the leader's data plane
            for scheduler in (self.leader.scheduler, self.follower):
                scheduler.drafts.drafter = setting.build_drafter(self.leader.executor)
        self.replay = CommandReplay(self.follower)
        self.plans: list[StepPlan] = []
        self.num_pinned = 0
        self.tags: Counter[bytes] = Counter()
        self.commands: list[Command] = []
        self.stream = CommandStream(self._send)
        CommandLog(self.leader.scheduler, self.stream, digest_interval)

    def _send(self, commands: bytes) -> None:
        self.tags[commands[:1]] += 1
        self.commands += decode(commands)
        self.plans += self.replay.apply(commands)

    def step(self) -> None:
        """Run a step of the leader and compare its plan, then all tables, with the follower's."""
        self.plans.clear()
        plan = self.leader.plan()
        assert self.plans == ([plan] if plan.items else [])
        self.leader.finish_step(plan)
        self.stream.flush()
        self.compare()

    def compare(self) -> None:
        """Compare queues, block tables and counters."""
        first, second = self.leader.scheduler, self.follower
        assert [each.seq_id for each in first.running] == [each.seq_id for each in second.running]
        assert [each.seq_id for each in first.waiting] == [each.seq_id for each in second.waiting]
        assert first.sequences.keys() == second.sequences.keys()
        for seq_id, sequence in first.sequences.items():
            assert sequence.tokens == second.sequences[seq_id].tokens
        states = first.memory.sequences.items()
        assert {seq_id: state.tables for seq_id, state in states} == {
            seq_id: state.tables for seq_id, state in second.memory.sequences.items()
        }
        assert first.memory.usage() == second.memory.usage()
        assert first.memory.pins.snapshot() == second.memory.pins.snapshot()


def serve(pair: Pair, arriving: list[Job]) -> None:
    """Run jobs with their arrivals and aborts to the end."""
    leader, added = pair.leader, dict[int, Request]()
    last = max(job.arrives_at for job in arriving)
    rng = random.Random(0)
    while leader.tick <= last or leader.scheduler.has_unfinished:
        for idx, job in enumerate(arriving):
            if job.arrives_at == leader.tick:
                added[idx] = leader.add(job, seed=idx)
            if job.abort_at == leader.tick and idx in added:
                leader.abort(added[idx])
        if rng.random() < 0.02:
            leader.scheduler.reset_prefix_cache()
        if leader.setting.pin_limit:
            pin_or_unpin(pair, rng)
        if rng.random() < 0.5:
            change_what_a_clock_decides(leader.scheduler, rng)
        pair.step()
    assert not pair.follower.has_unfinished


def change_what_a_clock_decides(scheduler: Scheduler, rng: random.Random) -> None:
    """Change what differs from step to step, and travels."""
    scheduler.chunk_tokens = rng.choice([None, 1, 4])
    drafter = scheduler.drafter
    if isinstance(drafter, AdaptiveDrafter):
        drafter.is_measuring = rng.random() < 0.1
        drafter.step_costs = [1.0, *(1.0 + rng.random() * depth / 4 for depth in range(1, 5))]
    scheduler.preemption.rates = TransferRates(rng.uniform(1e3, 1e9), rng.uniform(1, 1e4))


def pin_or_unpin(pair: Pair, rng: random.Random) -> None:
    """Pin the first blocks of a prompt, as far as they are cached, or let go of a pin."""
    scheduler, memory = pair.leader.scheduler, pair.leader.scheduler.memory
    name = f"/{rng.randrange(4)}"
    if name in memory.pins:
        if rng.random() < 0.05:
            scheduler.unpin(name)
    elif pair.leader.requests:
        request = rng.choice(pair.leader.requests[-8:])
        pair.num_pinned += scheduler.pin(name, memory.chain(request.prompt_token_ids, request.namespace))


@settings(max_examples=60)
@given(arriving=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings())
def test_the_log_repeats_random_runs(arriving: list[Job], setting: Setting) -> None:
    arriving = [Job(**{**vars(job), "media": ()}) for job in arriving]
    serve(Pair(Setting(**{**vars(setting), "drafts": ""}), digest_interval=2), arriving)


def test_block_tables_are_equal_after_500_steps() -> None:
    rng = random.Random(7)
    arriving = [
        Job(
            prompt=tuple(rng.choices((0, 1), k=rng.randrange(1, 40))),
            max_tokens=rng.randrange(1, 30),
            n=rng.choice([1, 1, 2]),
            ignore_eos=True,
            arrives_at=step,
            abort_at=rng.choice([NEVER, NEVER, step + 5]),
        )
        for step in range(0, 500, 2)
    ]
    pair = Pair(Setting(num_blocks=60, host_blocks=30, budget=24, max_num_seqs=8, pin_limit=12), digest_interval=3)
    serve(pair, arriving)
    assert pair.leader.tick >= 500
    assert pair.leader.scheduler.stats.num_preemptions > 0
    assert pair.num_pinned > 0
    assert min(pair.tags[tag] for tag in (b"p", b"r", b"[")) > 50, "messages of each form were repeated"


def test_a_pin_that_cannot_be_repeated_ends_the_ranks() -> None:
    pair = Pair(Setting(pin_limit=8))
    pair.leader.add(Job(prompt=(0, 1, 1, 0, 1), max_tokens=2, ignore_eos=True), seed=0)
    pair.step()
    scheduler = pair.leader.scheduler
    # Embeddings behind the pinned blocks do not matter; a block that has some is never cached.
    chain = scheduler.memory.chain([0, 1, 1, 0, 1], Namespace(), [MediaSpan(4, 1, b"x")])
    assert scheduler.pin("a", chain) == 4
    pair.step()
    assert "a" in pair.follower.memory.pins
    assert scheduler.pin("b", chain) == 4
    pair.follower.memory.reset_prefix_cache()
    with pytest.raises(LockstepDrift, match="pinned 4 tokens, of which 0 are"):
        pair.step()


@settings(max_examples=30)
@given(arriving=st.lists(samples, min_size=1, max_size=5), setting=narrow_settings())
def test_the_log_repeats_drafts_whose_number_follows_times(arriving: list[Job], setting: Setting) -> None:
    # Few tokens, so that earlier occurrences are found.
    arriving = [Job(**{**vars(job), "media": (), "max_tokens": 9, "ignore_eos": True}) for job in arriving]
    serve(Pair(Setting(**{**vars(setting), "drafts": ""}), has_drafts=True, digest_interval=2), arriving)


def test_a_request_that_the_scheduler_refuses_is_not_sent() -> None:
    pair = Pair(Setting(max_num_seqs=2))
    for job in (Job(prompt=(0,), n=3), Job(prompt=(0,) * 9000), Job(prompt=(), max_tokens=2)):
        with pytest.raises((InvalidParameter, PromptTooLong, ValueError)):
            pair.leader.add(job, seed=0)
    pair.leader.add(Job(prompt=(0, 1), ignore_eos=True), seed=0)
    with pytest.raises(ValueError, match="exists already"):
        pair.leader.add(Job(prompt=(0, 1)), seed=0)
    pair.step()
    assert [name for name, *_ in pair.commands].count("add") == 1


@settings(max_examples=30)
@given(arriving=st.lists(samples, min_size=1, max_size=5), setting=narrow_settings())
def test_the_log_repeats_drafts_of_a_model(arriving: list[Job], setting: Setting) -> None:
    arriving = [Job(**{**vars(job), "media": (), "max_tokens": 9, "ignore_eos": True}) for job in arriving]
    serve(Pair(Setting(**{**vars(setting), "drafts": "model"}), digest_interval=2), arriving)


@pytest.mark.parametrize("what", ["token", "block"])
def test_drift_is_an_error(what: str) -> None:
    pair = Pair(Setting())
    pair.leader.add(Job(prompt=(0, 1, 1), max_tokens=8, ignore_eos=True), seed=0)
    pair.step()
    (sequence,) = pair.follower.running
    if what == "token":
        sequence.tokens[-1] ^= 1
    else:
        pair.follower.memory.sequences[sequence.seq_id].tables[0][0] += 1
    with pytest.raises(LockstepDrift, match="are not those of rank 0"):
        pair.leader.finish_step(pair.leader.plan())


def request(**fields: Any) -> Request:
    given: dict[str, Any] = {
        "request_id": "a \ud800 b",
        "prompt_token_ids": [1, 2, 3],
        "params": SamplingParams(),
        "max_total_tokens": 9,
        "end_token_ids": frozenset({5, 2}),
        "arrival": 3,
        "seed": 2**63 - 1,
    }
    return Request(**given | fields)


def _as_list(embeddings: object) -> list[int]:
    assert isinstance(embeddings, tuple)
    return list(embeddings)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            temperature=0.1 + 0.2, top_p=1 / 3, logit_bias={3: -1.5, 7: 0.1}, seed=-4, stop=("a\ud800", "\n")
        ),
        SamplingParams(beam_width=4, n=2, early_stopping="never", length_penalty=0.7, stop_token_ids=(4, 5)),
        SamplingParams(structured_outputs=StructuredOutputs(choice=("yes", "no")), allowed_token_ids=(1, 2)),
        SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"})),
        SamplingParams(
            thinking=ThinkingTokens(1, (2, 3), (4, 2, 3), frozenset({9, 8}), has_headers=True), thinking_token_budget=3
        ),
        SamplingParams(prompt_logprobs=2, logprobs=3, output_kind=RequestOutputKind.FINAL_ONLY, max_tokens=None),
    ],
)
def test_requests_come_back_as_they_were(params: SamplingParams) -> None:
    given = request(
        params=params,
        priority=-3,
        flow="é",
        namespace=Namespace("m", "adapter", "salt", "tenant"),
        bad_words=((1, 2), (3,)),
        dry_breakers=(4, 5),
        pooling=Pooling((3, 4), "mean", 2),
        retain_cache=True,
        adapter=4,
        media=(Media(MediaSpan(1, 2, b"xy"), (5, 6), (1, 2), True), Media(MediaSpan(4, 1, b"z"), (7,))),
    )
    back = request_from_json(json.loads(json.dumps(request_to_json(given, _as_list))), tuple)
    assert back.params == params
    assert back.params.output_kind is params.output_kind
    for name in Request.__slots__:
        assert getattr(back, name) == getattr(given, name), name


def test_what_cannot_travel_is_refused_by_name() -> None:
    class Own:
        def num_draws(self, _: Any) -> int:
            return 1

        def advance(self, _: Any, token_ids: Any) -> Any:
            return token_ids

    pair, params = Pair(Setting()), SamplingParams(strategy=Own())  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeature) as refused:
        pair.leader.scheduler.add(request(params=params))
    assert refused.value.field == "strategy"
    assert not pair.leader.scheduler.requests
