"""Outputs that wait for those of later steps: nothing is lost, and neither a request's first nor its last one waits."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM
from quire.engine.async_llm import AsyncLLM
from quire.engine.outputs.output_processor import RequestState
from quire.engine.outputs.outputs import RequestMetrics, RequestOutput
from quire.errors import InvalidParameter
from quire.memory.invariants import check
from quire.sequences.params import RequestOutputKind, SamplingParams
from tests.engine.bundled import load

STORY = "Once there was a fox who lived by a river and had a red kite"
NUM_REQUESTS = 24
GAPS = "vllm:inter_token_latency_seconds_count"


@pytest.fixture(scope="module", params=[{}, {"async_scheduling": True}, {"speculative_method": "ngram"}], ids=str)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """An engine whose pool is too small for all requests."""
    llm = load(num_kv_blocks=24, block_size=4, max_model_len=80, enable_prefix_caching=False, **request.param)
    yield llm
    llm.close()


def params_of(place: int) -> SamplingParams:
    """Return parameters, of which each kind has outputs of its own: of tokens, texts, samples or numbers."""
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "seed": place}
    kinds: list[dict[str, Any]] = [
        {},
        {"detokenize": False},
        {"n": 2, "stop_token_ids": tuple(range(200, 264))},
        {"stop": ("the", "e a"), "min_tokens": 3},
        {"n": 2, "logprobs": 2, "prompt_logprobs": 1},
        {"n": 1, "best_of": 2},
        {"stop": ("fox",), "include_stop_str_in_output": True, "logprobs": 0},
        {"temperature": 0.0, "beam_width": 2, "seed": None, "max_tokens": 8},
    ]
    return SamplingParams(**(common | kinds[place % len(kinds)]))


def serve(llm: LLM, seed: int, may_hold: Callable[[], bool] | None) -> dict[str, list[RequestOutput]]:
    """Return the outputs of requests that come, and partly are aborted, at steps that the seed chooses."""
    rng, engine = random.Random(seed), llm.engine
    # How many drafts are made depends on times, and so does the step at which an abort would come.
    may_abort = engine.scheduler.drafter is None
    coming = list(range(NUM_REQUESTS))
    outputs: dict[str, list[RequestOutput]] = {}
    num_steps = 0
    while coming or engine.has_unfinished:
        num_steps += 1
        assert num_steps < 5000, "the run does not end"
        if coming and rng.random() < 0.4:
            place = coming.pop()
            engine.add_request(str(place), STORY[: 9 + 5 * (place % 4)], params_of(place))
            outputs[str(place)] = []
        if may_abort and rng.random() < 0.02:
            aborted = engine.abort_request(rng.choice([*outputs] or ["none"]))
            if aborted is not None:
                outputs[aborted.request_id].append(aborted)
        for output in engine.step(may_hold):
            outputs[output.request_id].append(output)
        check(engine.scheduler.memory)
    assert not engine.outputs.take_outputs(), "an output was held for nobody"
    return outputs


def merged(outputs: list[RequestOutput], *, has_drafts: bool = False) -> RequestOutput:
    """Return the deltas of a request as one, without its times.

    With drafts, whose number depends on times, also without that number, and without log probabilities: their last bits
    depend on the rows of a step.
    """
    first, *others = outputs
    for delta in others:
        first.add(delta)
    first.metrics = RequestMetrics()
    for sample in first.outputs if has_drafts else ():
        sample.num_draft_tokens = sample.num_accepted_tokens = 0
        sample.logprobs = sample.cumulative_logprob = None
    return first


@pytest.mark.parametrize("seed", range(3))
def test_held_outputs_are_those_of_each_step_together(llm: LLM, seed: int) -> None:
    """Of all kinds of requests, which preempt one another, end by themselves and are aborted."""
    at_once = serve(llm, seed, None)
    assert llm.stats.num_preemptions > 0
    has_drafts = llm.engine.scheduler.drafter is not None
    holds = random.Random(seed)
    held = serve(llm, seed, lambda: holds.random() < 0.8)
    num_outputs = [sum(map(len, served.values())) for served in (at_once, held)]
    assert num_outputs[1] < 0.6 * num_outputs[0]
    for request_id, outputs in at_once.items():
        both = (merged(each, has_drafts=has_drafts) for each in (outputs, held[request_id]))
        assert next(both) == next(both), f"request {request_id}"


def test_neither_the_first_nor_the_last_output_of_a_request_waits(llm: LLM) -> None:
    """Nor does one of another request when these come: held outputs go with them."""
    engine, lengths = llm.engine, (5, 9, 14)
    for place, max_tokens in enumerate(lengths):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(str(place), STORY[:12], params)
    news = [engine.step(lambda: True) for _ in range(max(lengths) + 1)]
    assert not engine.has_unfinished
    sent = [outputs for outputs in news if outputs]
    assert [len(outputs) for outputs in sent] == [3, 3, 2, 1]
    assert [sum(output.finished for output in outputs) for outputs in sent] == [0, 1, 1, 1]
    for place, max_tokens in enumerate(lengths):
        own = [output for outputs in sent for output in outputs if output.request_id == str(place)]
        assert sum(len(output.outputs[0].token_ids) for output in own) == max_tokens
    assert all(outputs[0].metrics.first_token_s is not None for outputs in sent)


def test_outputs_that_wait_are_taken_between_steps_and_go_with_an_abort(llm: LLM) -> None:
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for name in "ab":
        engine.add_request(name, STORY[:12], params)
    outputs = [output for _ in range(6) for output in engine.step(lambda: True)]
    aborted = engine.abort_request("a")
    assert aborted is not None
    (taken,) = engine.outputs.take_outputs()
    assert taken.request_id == "b"
    assert not engine.outputs.take_outputs()
    after = engine.abort_request("b")
    assert after is not None
    of_a = merged([output for output in outputs if output.request_id == "a"] + [aborted]).outputs[0]
    of_b = merged([output for output in outputs if output.request_id == "b"] + [taken, after]).outputs[0]
    assert of_a.token_ids == of_b.token_ids
    assert len(of_a.token_ids) > 4
    assert of_a.text == of_b.text
    assert of_a.finish_reason == of_b.finish_reason == "abort"


def test_a_request_that_is_read_at_its_end_has_one_output_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: Counter[str] = Counter()
    take_output = RequestState.take_output

    def count(state: RequestState, **options: Any) -> RequestOutput:
        taken[state.request.request_id] += 1
        return take_output(state, **options)

    monkeypatch.setattr(RequestState, "take_output", count)
    llm = AsyncLLM.from_options("bundled", dtype="float32", num_kv_blocks=64, num_threads=1)
    llm._thread._pacer.may_hold = lambda: True  # type: ignore[method-assign]
    llm._thread._next_progress_s = math.inf
    assert llm.tokenizer is not None
    ends = llm.tokenizer.encode(".")
    final = {"output_kind": RequestOutputKind.FINAL_ONLY, "seed": 6}

    async def generate(name: str, **params: Any) -> list[RequestOutput]:
        return [output async for output in llm.generate(STORY, SamplingParams(**params), request_id=name)]

    async def scenario() -> Any:
        return await asyncio.gather(
            generate("whole", **final, max_tokens=12, ignore_eos=True),
            generate("samples", **final, n=3, max_tokens=48, stop_token_ids=ends, min_tokens=4),
            generate("deltas", temperature=0.0, max_tokens=64, ignore_eos=True),
        )

    try:
        ((whole,), (samples,), deltas) = asyncio.run(scenario())
        (counted,) = [line for line in llm.metrics.render().decode().splitlines() if GAPS in line]
    finally:
        llm.shutdown()
    assert len(whole.outputs[0].token_ids) == 12
    lengths = [len(output.token_ids) for output in samples.outputs]
    assert max(lengths) - min(lengths) > 6
    assert sum(len(delta.outputs[0].token_ids) for delta in deltas) == 64
    # With the first tokens of three requests, the ends of five samples, and nothing else.
    assert (taken["whole"], taken["samples"]) == (1, 1)
    assert taken["deltas"] <= 8
    num_tokens = 12 + sum(lengths) + 64
    assert float(counted.split()[-1]) == num_tokens - 5, "gaps between the tokens of five samples"


def test_what_is_read_at_its_end_says_now_and_then_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deltas together are the whole output, with samples of which one ends first."""
    monkeypatch.setattr("quire.engine.engine_thread.PROGRESS_S", 0.0)
    llm = AsyncLLM.from_options("bundled", dtype="float32", num_kv_blocks=64, num_threads=1)
    llm._thread._pacer.may_hold = lambda: True  # type: ignore[method-assign]
    assert llm.tokenizer is not None
    ends = tuple(llm.tokenizer.encode("."))
    params = SamplingParams(n=3, seed=6, max_tokens=48, stop_token_ids=ends, min_tokens=4)

    async def generate(*, final_only: bool) -> list[RequestOutput]:
        return [output async for output in llm.generate(STORY, params, final_only=final_only)]

    try:
        held, told = (asyncio.run(generate(final_only=final_only)) for final_only in (False, True))
    finally:
        llm.shutdown()
    # A slow reader may get several as one.
    assert len(told) > 2
    assert [output.finished for output in told] == [False] * (len(told) - 1) + [True]
    whole = merged(told)
    assert whole.outputs == merged(held).outputs
    assert len({len(sample.token_ids) for sample in whole.outputs}) == 3


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_final_only_is_true_or_false(given: Any) -> None:
    """Another value is refused at the first item, and takes no slot of the queue."""
    llm = AsyncLLM.from_options("bundled", num_kv_blocks=64, num_threads=1)

    async def generate() -> list[RequestOutput]:
        with pytest.raises(InvalidParameter, match=f"final_only must be true or false, got {given!r}"):
            async for _ in llm.generate(STORY, SamplingParams(max_tokens=2), final_only=given):
                pass
        return [output async for output in llm.generate(STORY, SamplingParams(max_tokens=2))]

    try:
        assert asyncio.run(generate())[-1].finished
        assert llm._slots.num_waiting == 0
    finally:
        llm.shutdown()
