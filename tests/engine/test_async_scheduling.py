"""Asynchronous scheduling: the same outputs as step by step, over any history, with at most two steps in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputs
from quire.config import EngineConfig, Machine, ModelFacts, resolve
from quire.engine.engine import Engine, StepInFlight
from quire.engine.inputs.request_options import RequestOptions
from quire.errors import ConfigError
from quire.execution.sampling.device.device_rows import DeviceRows
from quire.memory import check
from quire.memory.recording.replay import replay
from quire.scheduling.plan import StepPlan
from quire.scheduling.scheduler import Scheduler
from quire.sequences.decoding.speculation import AdaptiveDrafter
from quire.sequences.decoding.stop import end_of_tokens
from quire.sequences.sequence import Sequence
from quire.sequences.status import FinishReason
from tests.engine.ahead_simulation import AheadSimulation
from tests.engine.failing import Failures
from tests.engine.sampling_world import told
from tests.scheduling.auditor import Auditor
from tests.scheduling.harness import END_TOKEN, NEVER, VOCAB_SIZE, Job, Setting, run
from tests.scheduling.random_jobs import agrees, jobs, narrow_settings, undisturbed

ahead_scheduler = partial(Scheduler, plans_ahead=True)


class AuditedEngine(Engine):
    """An engine that is audited before each plan: a step may have two of them, and results in between."""

    auditor: Auditor

    def _begin(self) -> StepInFlight | None:
        self.auditor.check_queues()
        return super()._begin()


class AheadEngine:
    """The real engine, scheduler and memory over a simulated data plane, audited after each step.

    A token takes a second to compute.

    Args:
        setting: sizes and options.
        make_scheduler: class of the scheduler, or a function that makes one of the same arguments.
    """

    def __init__(self, setting: Setting, make_scheduler: Callable[..., Scheduler] = ahead_scheduler) -> None:
        facts = ModelFacts(max_position=512, bytes_per_token=4, vocab_size=VOCAB_SIZE, num_parameters=1)
        # Jobs have priorities whatever the scheduler's policy, and an engine takes them under this policy alone.
        sizes: dict[str, Any] = {"num_kv_blocks": 500, "max_num_seqs": setting.max_num_seqs}
        options = EngineConfig.from_options(**sizes, scheduling_policy="priority")
        config = resolve(options, Machine(device="cpu", available_bytes=1 << 30, num_threads=1), facts)
        self.memory = setting.build_memory()
        self.scheduler = make_scheduler(self.memory, **setting.scheduler_options)
        self.executor = AheadSimulation(setting.block_size, VOCAB_SIZE, setting.groups)
        self.executor.failures = Failures(random.Random(0), 0.0)
        drafter = self.scheduler.drafts.drafter = setting.build_drafter(self.executor)
        self.engine = AuditedEngine(
            config,
            self.scheduler,
            self.executor,
            None,
            end_token_ids=frozenset({END_TOKEN}),
            cache_name="",
            clock=lambda: float(self.executor.num_computed_tokens),
            speculation=drafter if isinstance(drafter, AdaptiveDrafter) and setting.drafts == "adaptive" else None,
        )
        self.auditor = self.engine.auditor = Auditor(self.scheduler)
        self.outputs: dict[str, list[list[int]]] = {}

    def add(self, job: Job, seed: int) -> None:
        params = replace(job.params, seed=seed, detokenize=False)
        prompt = {"prompt_token_ids": list(job.prompt)}
        options: dict[str, Any] = {"priority": job.priority, "flow": job.flow, "cache_salt": job.cache_salt}
        self.engine.add_request(str(seed), prompt, params, RequestOptions(**options))
        self.outputs[str(seed)] = []

    def step(self) -> None:
        """Run a step, and audit memory and queues; the step in flight has left nothing in what is published."""
        self._collect(self.engine.step())
        self._audit()

    def abort(self, seed: int) -> None:
        output = self.engine.abort_request(str(seed))
        self._collect([] if output is None else [output])
        self._audit()

    def _collect(self, news: list[RequestOutput]) -> None:
        for output in news:
            assert output.error is None, output.error
            samples = self.outputs[output.request_id]
            for sample in output.outputs:
                samples += [[] for _ in range(sample.index + 1 - len(samples))]
                samples[sample.index] += sample.token_ids

    def _audit(self) -> None:
        check(self.memory)
        self.auditor.check_queues()
        assert self.executor.num_unread <= self.engine.has_unfinished, "a step is in flight for nobody"
        for sequence in self.scheduler.sequences.values():
            assert min(sequence.tokens) >= 0, "a placeholder was left"


def run_ahead(
    arriving: list[Job], setting: Setting, make_scheduler: Callable[..., Scheduler] = ahead_scheduler
) -> AheadEngine:
    """Serve jobs as they come and go, until nobody is left; nothing is held then."""
    world, tick = AheadEngine(setting, make_scheduler), 0
    most_steps = 400 + 80 * sum(len(job.prompt) + (job.beam_width or job.n) * job.max_tokens for job in arriving)
    while tick <= max(job.arrives_at for job in arriving) or world.engine.has_unfinished:
        assert tick < most_steps, "the run does not end"
        for seed, job in enumerate(arriving):
            if job.arrives_at == tick:
                world.add(job, seed)
            if job.abort_at == tick > job.arrives_at:
                world.abort(seed)
        world.step()
        tick += 1
    usage = world.memory.usage()
    assert usage.used == 0
    assert usage.host is None or usage.host.used == 0
    assert not world.scheduler.requests
    assert world.executor.most_unread <= 2
    # What was closed is told with the next plan.
    world.add(Job(prompt=(1,), max_tokens=1), len(arriving))
    world.step()
    assert world.executor.num_open == 1
    return world


def assert_undisturbed(world: AheadEngine, arriving: list[Job]) -> None:
    """See that each job had the tokens that it has by itself, up to its abort."""
    for seed, (job, expected) in enumerate(zip(arriving, undisturbed(arriving), strict=True)):
        found = world.outputs[str(seed)]
        was_aborted = job.arrives_at < job.abort_at < NEVER
        assert agrees(job if was_aborted else replace(job, abort_at=NEVER), found, expected)


@settings(max_examples=6)
@given(arriving=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings())
def test_tokens_are_those_of_step_by_step(arriving: list[Job], setting: Setting) -> None:
    """With arrivals, aborts, ends, samples and beams, in pools that preempt, swap, evict and share."""
    # An abort in the same step as the arrival comes before any token.
    arriving = [replace(job, prompt_logprobs=None, media=()) for job in arriving]
    assert_undisturbed(run_ahead(arriving, replace(setting, drafts="")), arriving)


@pytest.mark.slow
@settings(max_examples=300)
@given(arriving=st.lists(jobs, min_size=1, max_size=9), setting=narrow_settings())
def test_tokens_are_those_of_step_by_step_in_many_runs(arriving: list[Job], setting: Setting) -> None:
    test_tokens_are_those_of_step_by_step.hypothesis.inner_test(arriving, setting)  # type: ignore[attr-defined]


def placeholder_scheduler(*args: Any, **options: Any) -> Scheduler:
    """Return a scheduler that plans each step with placeholders, as decodes of all running sequences do not need."""
    scheduler = ahead_scheduler(*args, **options)
    scheduler._ahead._is_all = lambda _: False  # type: ignore[method-assign]
    return scheduler


@settings(max_examples=6)
@given(arriving=st.lists(jobs, min_size=1, max_size=7), setting=narrow_settings())
def test_plans_of_decodes_are_those_with_placeholders(arriving: list[Job], setting: Setting) -> None:
    arriving = [replace(job, prompt_logprobs=None, media=()) for job in arriving]
    setting = replace(setting, drafts="")
    short, whole = (run_ahead(arriving, setting, each) for each in (ahead_scheduler, placeholder_scheduler))
    assert short.executor.launched == whole.executor.launched


@pytest.mark.slow
@settings(max_examples=300)
@given(arriving=st.lists(jobs, min_size=1, max_size=9), setting=narrow_settings())
def test_plans_of_decodes_are_those_with_placeholders_in_many_runs(arriving: list[Job], setting: Setting) -> None:
    test_plans_of_decodes_are_those_with_placeholders.hypothesis.inner_test(  # type: ignore[attr-defined]
        arriving, setting
    )


def test_decodes_are_planned_without_a_look_at_each_sequence_until_one_ends_or_comes() -> None:
    """A request that comes in between is planned as ever, until it has ended: then the others have four steps left."""
    jobs = [Job(prompt=(1, idx), max_tokens=12, ignore_eos=True) for idx in range(3)]
    jobs.append(Job(prompt=(1, 9), max_tokens=2, ignore_eos=True, arrives_at=4))
    world = AheadEngine(Setting())
    for seed, job in enumerate(jobs[:3]):
        world.add(job, seed)
    left: list[int | None] = []
    while world.engine.has_unfinished:
        if len(left) == jobs[3].arrives_at:
            world.add(jobs[3], 3)
        world.step()
        run = world.scheduler._ahead._run
        left.append(None if run is None else run.num_steps)
    assert left == [None, 9, 8, 7, None, None, 4, 3, 2, 1, None, None]


def test_an_end_by_length_costs_no_step_and_an_end_token_costs_one_token() -> None:
    """As many items as step by step where the lengths are known; else one more for each that ends unforeseen."""
    known = [Job(prompt=(1, idx), max_tokens=3 + idx, ignore_eos=True) for idx in range(3)]
    world = run_ahead(known, Setting())
    num_tokens = sum(len(job.prompt) + job.max_tokens - 1 for job in known)
    assert world.executor.num_computed_tokens == num_tokens + 1  # of the passer-by
    assert world.engine.stats.computed_tokens == world.executor.num_computed_tokens
    # Each token but the first of a request is decoded behind one that was not read.
    assert world.executor.num_ahead == sum(job.max_tokens - 1 for job in known)
    # All of these steps but the one after the prompts have their results in columns.
    assert world.executor.num_in_columns == max(job.max_tokens for job in known) - 2
    unknown = [Job(prompt=(1, idx), max_tokens=40) for idx in range(6)]
    world = run_ahead(unknown, Setting())
    ended = [samples[0] for samples in world.outputs.values() if samples[0][-1] == END_TOKEN]
    assert len(ended) > 3
    stats = world.engine.stats
    assert world.executor.num_computed_tokens - stats.computed_tokens == len(ended)
    assert stats.generation_tokens == sum(len(samples[0]) for samples in world.outputs.values())


def test_rows_that_wait_for_the_host_stay_together_where_they_are_most() -> None:
    """Requests that come one after the other are in one step; beside more that go on, each waits for every second.

    Rows with penalties are among those that go on. Where the device draws what waits, as with a grammar, fewer
    than 16 rows that go on for each are few.
    """
    cases = ((0, False, False), (1, False, False), (4, True, False), (4, False, True), (47, False, True))
    for num_plain, is_ahead, is_drawn_on_device in (*cases, (48, True, True)):
        world = AheadEngine(Setting())
        plans: list[StepPlan] = []
        launch = world.executor.launch

        def seen(plan: StepPlan, launch: Any = launch, plans: list[StepPlan] = plans) -> Any:
            plans.append(plan)
            return launch(plan)

        world.executor.launch = seen  # type: ignore[method-assign]
        for seed in range(3):
            params = SamplingParams(max_tokens=20, ignore_eos=True, logit_bias={3: 1.0}, seed=seed, detokenize=False)
            world.engine.add_request(f"host {seed}", {"prompt_token_ids": [1, seed]}, params)
            if is_drawn_on_device:
                world.scheduler.requests[f"host {seed}"].drawn_from = 2
            world.engine.step()
        params = replace(params, logit_bias=None, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1)
        for seed in range(num_plain):
            world.engine.add_request(f"plain {seed}", {"prompt_token_ids": [2, seed % VOCAB_SIZE]}, params)
        for _ in range(3):
            world.engine.step()
        plans.clear()
        for _ in range(8):
            world.engine.step()
        sizes = {len(plan.items) for plan in plans}
        assert sizes == {num_plain, num_plain + 3} if is_ahead else sizes == {num_plain + 3}


def test_one_function_ends_samples_beams_and_asynchronous_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rule in this function alone is the rule of all of them."""

    def at_three(sequence: Sequence, _token_id: int, num_before: int = 0) -> object:
        return (FinishReason.LENGTH, None) if sequence.num_output + num_before + 1 >= 3 else None

    jobs = [Job(prompt=(1, idx), max_tokens=9, n=idx + 1) for idx in range(3)]
    jobs.append(Job(prompt=(2,), max_tokens=9, beam_width=2))
    monkeypatch.setattr(end_of_tokens, "__code__", at_three.__code__)
    by_step = run(jobs, Setting()).outputs
    world = run_ahead(jobs, Setting())
    assert [world.outputs[str(seed)] for seed in range(4)] == by_step
    assert [list(map(len, samples)) for samples in by_step] == [[3], [3] * 2, [3] * 3, [3]]


def test_a_sequence_that_lacks_memory_waits_for_one_step() -> None:
    """The pool holds one of two: the first in order preempts the other, though plans ahead may not."""
    setting = Setting(num_blocks=6, block_size=2, budget=8, max_num_seqs=2, caching=False)
    arriving = [Job(prompt=(1, idx), max_tokens=9, ignore_eos=True) for idx in range(2)]
    world = run_ahead(arriving, setting)
    assert [world.outputs[str(seed)] for seed in range(2)] == undisturbed(arriving)
    assert world.scheduler.stats.num_preemptions > 0


# ---- the real data plane ----

STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "


def never_the_same(_prompt: list[int], output: list[int], logits: Any) -> Any:
    logits[sorted(set(output))] = -float("inf")
    return logits


def mixed_params() -> list[SamplingParams]:
    """Return plain rows, rows with penalties, rows that end unforeseen, and rows that wait for the host."""
    return [
        SamplingParams(temperature=0.0, max_tokens=14),
        SamplingParams(seed=1, max_tokens=17, logprobs=3, top_k=40),
        SamplingParams(temperature=0.0, max_tokens=30, stop=("fox", " the"), presence_penalty=0.4),
        SamplingParams(seed=3, max_tokens=12, structured_outputs=StructuredOutputs(regex="[a-z ]{3,20}[.!]")),
        SamplingParams(seed=4, max_tokens=9, logits_processors=(never_the_same,)),
        SamplingParams(seed=5, max_tokens=25, repetition_penalty=1.3, logprobs=0),
        SamplingParams(seed=6, max_tokens=9, n=2, min_p=0.05, frequency_penalty=0.7),
        SamplingParams(temperature=0.0, max_tokens=8, beam_width=2),
        SamplingParams(seed=8, max_tokens=20, stop_token_ids=tuple(range(200, 264)), min_tokens=3, presence_penalty=1),
        SamplingParams(seed=9, max_tokens=10, prompt_logprobs=2),
    ]


def serve(llm: LLM, *, final_only: bool = False) -> list[Any]:
    """Serve two rounds of requests that come one after the other; the second one finds the prefixes of the first."""
    engine, found = llm.engine, dict[str, RequestOutput]()
    given_params = mixed_params() * 2
    for place, params in enumerate(given_params):
        engine.add_request(str(place), STORY[: 17 * (place % 4) + 12], params, RequestOptions(final_only=final_only))
        for news in engine.step() if place % 3 else []:
            add(found, news)
    while engine.has_unfinished:
        for news in engine.step():
            assert news.finished or not final_only
            add(found, news)
        check(engine.scheduler.memory)
    assert llm.usage().used == 0
    return [told(found[str(place)]) for place in range(len(given_params))]


def add(found: dict[str, RequestOutput], news: RequestOutput) -> None:
    if news.request_id in found:
        found[news.request_id].add(news)
    else:
        found[news.request_id] = news


MIXED: dict[str, Any] = {"num_threads": 1, "max_model_len": 64, "block_size": 4, "deterministic": True}


def served_step_by_step() -> list[Any]:
    """Return what `serve` gives where nothing is short or planned ahead."""
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    try:
        return serve(LLM("bundled", **MIXED))
    except ConfigError:
        pytest.skip("no native kernels were built")


@pytest.mark.parametrize("policy", [None, "write_back", "write_through"])
def test_all_kinds_of_rows_in_one_batch_have_the_outputs_of_step_by_step(policy: str | None, tmp_path: Any) -> None:
    """To the bit, in a pool that preempts and swaps, and with a disk; and what was recorded of memory runs again."""
    expected = served_step_by_step()
    options = MIXED | {"num_kv_blocks": 24, "swap_space": 1 << 20, "record_memory": str(tmp_path / "memory.log")}
    if policy is not None:
        # A host tier of a few blocks, which are demoted to the disk.
        options |= {"prefix_cache_dir": str(tmp_path / "disk"), "prefix_cache_write_policy": policy}
        options |= {"swap_space": 1 << 17}
    with closing(LLM("bundled", **options, async_scheduling=True)) as llm:
        assert serve(llm, final_only=True) == expected
        assert llm.stats.num_preemptions > 0
        assert policy is None or (llm.stats.disk is not None and llm.stats.disk.num_saved > 0)
    with (tmp_path / "memory.log").open(encoding="utf-8") as lines:
        assert replay(lines, check_every=50).fault is None
    if policy is not None:
        with closing(LLM("bundled", **options | {"record_memory": None}, async_scheduling=True)) as llm:
            assert serve(llm, final_only=True) == expected
            assert llm.stats.disk is not None
            assert llm.stats.disk.num_hits > 3
            assert llm.stats.num_preemptions > 0


def fail_draws(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let draws fail in which a row of seed 13 is far enough; return the numbers of rows of those that did."""
    draw, failed = DeviceRows.draw, list[int]()

    def draw_or_fail(self: DeviceRows, logits: Any, items: Any, positions: Any = None) -> Any:
        if any(self._states[item.seq_id].seed == 13 and item.start > 40 for item in items):
            failed.append(len(items))
            raise RuntimeError("index lost")
        return draw(self, logits, items, positions)

    monkeypatch.setattr(DeviceRows, "draw", draw_or_fail)
    return failed


def test_a_row_that_cannot_be_sampled_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step behind it, which is launched before the host knows, has no token for it."""
    fail_draws(monkeypatch)
    params = [
        SamplingParams(seed=seed, max_tokens=40, ignore_eos=True, presence_penalty=0.5 * (seed > 12))
        for seed in (12, 13, 14)
    ]
    with closing(LLM("bundled", num_threads=1, max_model_len=128, async_scheduling=True)) as llm:
        good, bad, other = llm.generate([STORY] * 3, params, use_tqdm=False)
        assert "could not be sampled" in (bad.error or "")
        assert (good.error, other.error) == (None, None)
        assert len(good.outputs[0].token_ids) == len(other.outputs[0].token_ids) == 40
        assert llm.usage().used == 0


def test_an_engine_is_closed_with_a_step_in_flight() -> None:
    llm = LLM("bundled", num_threads=1, max_model_len=64, async_scheduling=True)
    assert llm.engine.scheduler.plans_ahead
    llm.engine.add_request("a", STORY, SamplingParams(max_tokens=30, ignore_eos=True))
    llm.engine.step()
    llm.close()
    assert llm.usage().used == 0
