"""Asynchronous scheduling on ranks: the tokens of one process, the same plans on all ranks, and the end of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams, StructuredOutputs
from quire.memory.manager import KVCacheManager
from quire.scheduling.command_log import CommandLog, CommandReplay, CommandStream
from quire.scheduling.plan import StepPlan
from quire.scheduling.scheduler import Scheduler
from quire.sequences.decoding.speculation import AdaptiveDrafter
from tests.distributed.engines import llm_of_threads
from tests.engine.sampling_world import never_the_same
from tests.engine.test_async_drafts import resting_drafts, short_rests
from tests.engine.test_async_scheduling import run_ahead
from tests.engine.test_ranks import GREEDY, OPTIONS, PROMPTS, check_a_killed_rank, texts
from tests.engine.test_staged_ranks import SCARCE
from tests.scheduling.harness import Job, Setting
from tests.scheduling.random_jobs import jobs, narrow_settings


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[LLM, LLM]]:
    """Return an engine of one process that runs step by step, and one of two ranks that runs ahead."""
    options = {**OPTIONS, **SCARCE}
    with LLM("bundled", **options) as one, llm_of_threads(async_scheduling=True, **options) as two:
        assert two.engine.scheduler.plans_ahead
        yield one, two


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=56, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=5, max_tokens=20, repetition_penalty=1.2, logprobs=2, top_p=0.9),
        SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, presence_penalty=0.4),
        SamplingParams(beam_width=3, n=2, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=StructuredOutputs(regex="[a-c]{3} [0-9]{4}")),
        SamplingParams(temperature=0.0, max_tokens=60, stop=("the", ".")),
        SamplingParams(temperature=0.0, max_tokens=5, prompt_logprobs=1, min_tokens=3),
        SamplingParams(temperature=0.0, max_tokens=20, logits_processors=(never_the_same,)),
    ],
    ids=["greedy", "penalties", "samples", "beams", "grammar", "stop strings", "prompt logprobs", "processors"],
)
def test_ranks_that_run_ahead_give_what_one_process_gives(params: SamplingParams, pair: tuple[LLM, LLM]) -> None:
    one, two = pair
    assert texts(two, params) == texts(one, params)
    # Prefixes are cached now, and requests end in flight.
    stream: Any = two.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    assert texts(two, params) == texts(one, params)
    assert two.usage().used == 0


def test_they_were_preempted_and_swapped(pair: tuple[LLM, LLM]) -> None:
    two = pair[1]
    two.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True), use_tqdm=False)
    assert two.stats.num_swaps > 0


class EchoedDrafter:
    """Proposes what the drafter of a logged scheduler does, or its source, for the scheduler that follows it."""

    def __init__(self, followed: Followed) -> None:
        self._followed = followed

    def __getattr__(self, name: str) -> Any:
        drafter: Any = self._followed.scheduler.drafter
        return getattr(drafter._source if isinstance(drafter, AdaptiveDrafter) else drafter, name)


class Followed:
    """A scheduler whose log is repeated by another one as it is sent.

    Args:
        setting: sizes and options.
        digest_interval: steps from one comparison of digests to the next.

    Attributes:
        plans: plans of the other scheduler that have items.
        tags: first bytes of all messages.
    """

    def __init__(self, setting: Setting, digest_interval: int = 1) -> None:
        self._digest_interval = digest_interval
        self.plans: list[StepPlan] = []
        self.tags = bytearray()
        self.follower = Scheduler(setting.build_memory(), **setting.scheduler_options, plans_ahead=True)
        if setting.drafts:
            self.follower.drafts.drafter = echoed = EchoedDrafter(self)
            if setting.drafts in ("adaptive", "resting"):
                self.follower.drafts.drafter = AdaptiveDrafter(echoed, 4)
        self._replay = CommandReplay(self.follower)

    def make(self, memory: KVCacheManager, **options: Any) -> Scheduler:
        """Return the scheduler that is logged."""
        self.scheduler = Scheduler(memory, **options, plans_ahead=True)
        self.stream = CommandStream(self._send)
        CommandLog(self.scheduler, self.stream, self._digest_interval)
        return self.scheduler

    def _send(self, message: bytes) -> None:
        self.tags += message[:1]
        self.plans += self._replay.apply(message)


@settings(max_examples=10)
@given(arriving=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings())
def test_a_second_scheduler_plans_the_same_steps_ahead(arriving: list[Job], setting: Setting) -> None:
    """In any history, with drafts too; digests of plan and block tables are compared in each step."""
    followed = Followed(setting)
    world = run_ahead([replace(job, prompt_logprobs=None, media=()) for job in arriving], setting, followed.make)
    assert followed.plans == world.executor.launched
    followed.stream.flush()
    assert not followed.follower.requests
    assert followed.follower.memory.usage() == world.memory.usage()


@settings(max_examples=10)
@given(
    arriving=st.lists(jobs, min_size=1, max_size=7),
    setting=narrow_settings(),
    drafts=resting_drafts,
)
def test_it_does_where_drafts_rest(arriving: list[Job], setting: Setting, drafts: str) -> None:
    """The costs of drafts, and when a step is to be measured, come with the log; rests are each scheduler's own."""
    with short_rests():
        test_a_second_scheduler_plans_the_same_steps_ahead.hypothesis.inner_test(  # type: ignore[attr-defined]
            arriving, replace(setting, drafts=drafts)
        )


@pytest.mark.slow
@settings(max_examples=300)
@given(
    arriving=st.lists(jobs, min_size=1, max_size=9),
    setting=narrow_settings(),
    drafts=resting_drafts,
)
def test_it_does_where_drafts_rest_in_many_runs(arriving: list[Job], setting: Setting, drafts: str) -> None:
    test_it_does_where_drafts_rest.hypothesis.inner_test(arriving, setting, drafts)  # type: ignore[attr-defined]


@pytest.mark.slow
@settings(max_examples=300)
@given(arriving=st.lists(jobs, min_size=1, max_size=9), setting=narrow_settings())
def test_a_second_scheduler_plans_the_same_steps_ahead_in_many_runs(arriving: list[Job], setting: Setting) -> None:
    test_a_second_scheduler_plans_the_same_steps_ahead.hypothesis.inner_test(  # type: ignore[attr-defined]
        arriving, setting
    )


def test_most_steps_travel_in_the_short_form() -> None:
    followed = Followed(Setting(), digest_interval=32)
    run_ahead([Job(prompt=(1, idx), max_tokens=50, ignore_eos=True) for idx in range(3)], Setting(), followed.make)
    assert followed.tags.count(b"a") > 45
    assert followed.tags.count(b"r") > 45
    assert followed.tags.count(b"[") < 10


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shared_memory", "gloo"])
@pytest.mark.parametrize("when", ["stepping", "idle"])
def test_a_killed_rank_ends_the_engine_with_its_name(backend: str, when: str) -> None:
    check_a_killed_rank(when, all_reduce_backend=backend, async_scheduling=True)
