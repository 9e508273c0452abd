"""Random sampling parameters in random batches: every output is that of the request alone, to the bit.

With `deterministic`, a row's logits do not depend on the rows beside it. So whatever differs here is the doing of what
comes behind them: masks, penalties, filters, draws, strategies, drafts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire import LLM, SamplingParams
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import RequestError
from quire.execution.sampling import beam_sampling
from quire.execution.sampling import sampling as draws
from quire.execution.sampling.beam_candidates import find_candidates
from tests.engine.sampling_world import PROMPTS, VALUES, Asked, asked, each_value, told
from tests.ops.backends import LIBRARIES

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="no native kernels were built")

ENGINES: dict[str, dict[str, Any]] = {
    "plenty": {},
    "tight": {
        "num_kv_blocks": 52,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 24,
        "swap_space": 1 << 22,
        "scheduling_policy": "priority",
    },
    "drafts": {"speculative_method": "suffix", "num_speculative_tokens": 5},
    "ahead": {
        "async_scheduling": True,
        "num_kv_blocks": 60,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 40,
        "swap_space": 1 << 22,
        "scheduling_policy": "priority",
    },
}
Refusal = tuple[str, str]
# Of each request, by its identity: itself, and its output alone. Several engines are compared with it.
Alone = dict[int, tuple[Asked, RequestOutput | Refusal]]


def load(**options: Any) -> LLM:
    usual = {"num_kv_blocks": 256, "max_num_seqs": 24, "max_model_len": 96, "num_threads": 1, "block_size": 8}
    return LLM("bundled", deterministic=True, **usual | options)


@pytest.fixture(scope="module")
def quiet() -> Iterator[LLM]:
    """An engine that serves one request at a time, without drafts and without a prefix cache."""
    llm = load(enable_prefix_caching=False, scheduling_policy="priority")
    yield llm
    llm.close()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in ("tight", "ahead") else pytest.mark.slow) for name in ENGINES],
)
def busy(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = load(**ENGINES[request.param])
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def alone() -> Alone:
    return {}


@cache
def values() -> list[Asked]:
    """Return requests with every value of every parameter, the same objects for every engine."""
    return each_value()


@cache
def company(seed: int) -> list[Asked]:
    """Return random requests, the same objects for every engine."""
    random = Random(seed)
    return [asked(random) for _ in range(30)]


def serve(llm: LLM, requests: list[Asked]) -> list[RequestOutput | Refusal]:
    """Serve requests that come as their delays say."""
    engine, outputs = llm.engine, dict[str, RequestOutput | Refusal]()
    due, tick = 0, 0
    waiting = list(enumerate(requests))
    while waiting or engine.has_unfinished:
        while waiting and waiting[0][1].delay + due <= tick:
            place, one = waiting.pop(0)
            due = tick
            params = one.params
            if engine.scheduler.drafter is None:
                params = dataclasses.replace(params, speculative=None)
            options = one.options
            if engine.config.scheduling_policy != "priority":
                options = {**options, "priority": 0}
            try:
                engine.add_request(str(place), one.prompt, params, RequestOptions(**options))
            except RequestError as error:
                outputs[str(place)] = (error.code, str(error))
        for news in engine.step():
            known = outputs.get(news.request_id)
            if known is None:
                outputs[news.request_id] = news
            else:
                assert isinstance(known, RequestOutput)
                known.add(news)
        tick += 1
    return [outputs[str(place)] for place in range(len(requests))]


def check(quiet: LLM, busy: LLM, requests: list[Asked], alone: Alone) -> int:
    """Compare the outputs of requests in company with those of each alone; return how many failed as they should.

    Args:
        requests: lists that several engines serve are the same objects, so that each is served alone once.
    """
    num_failed = 0
    for one, found in zip(requests, serve(busy, requests), strict=True):
        if id(one) not in alone:
            alone[id(one)] = (one, serve(quiet, [dataclasses.replace(one, delay=0)])[0])
        expected = alone[id(one)][1]
        if not isinstance(expected, RequestOutput) or not isinstance(found, RequestOutput):
            assert found == expected, one
            continue
        assert found.finished
        assert found.error_code != "engine_failed", (one, found.error)
        assert told(found) == told(expected), one
        num_failed += found.error is not None
    assert busy.usage().used == quiet.usage().used == 0
    return num_failed


def test_every_value_of_every_parameter(quiet: LLM, busy: LLM, alone: Alone) -> None:
    assert check(quiet, busy, values(), alone) < 10


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_parameters_in_any_company(quiet: LLM, busy: LLM, alone: Alone, seed: int) -> None:
    assert 0 < check(quiet, busy, company(seed), alone) < 10


def rounds_shares(patch: pytest.MonkeyPatch) -> SamplingParams:
    """A share that float32 rounds to 0 leaves no token to draw from, which raises for all rows of the step."""
    patch.setattr(draws, "_float64", lambda values, _device: torch.tensor(values).double())
    return SamplingParams(typical_p=1e-300, max_tokens=5)


def loses_wide_searches(patch: pytest.MonkeyPatch) -> SamplingParams:
    """Candidates are looked for once all other rows of the step are drawn, and grammars have their tokens."""

    def fail(logits: torch.Tensor, rows: Any, groups: Any, keep: Any) -> Any:
        if any(group.num_candidates % 7 == 0 for group in groups):  # of seven beams
            raise RuntimeError("index lost")
        return find_candidates(logits, rows, groups, keep)

    patch.setattr(beam_sampling, "find_candidates", fail)
    return SamplingParams(beam_width=7, max_tokens=5)


@pytest.mark.parametrize("defect", [rounds_shares, pytest.param(loses_wide_searches, marks=pytest.mark.slow)])
def test_a_defect_of_the_sampler_ends_the_requests_that_show_it(
    quiet: LLM, busy: LLM, defect: Callable[[pytest.MonkeyPatch], SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(8)
    # In the middle of their outputs when the first bad request comes.
    forms = [form for form in VALUES["structured_outputs"] if form is not None] * 2
    drawn = (SamplingParams(seed=place, max_tokens=40, structured_outputs=form) for place, form in enumerate(forms))
    others = [Asked(PROMPTS[2], params, {}, 0) for params in drawn]
    others += [one for one in (asked(random) for _ in range(40)) if one.params.typical_p == 1.0]
    expected = [serve(quiet, [dataclasses.replace(one, delay=0)])[0] for one in others]
    bad = Asked(PROMPTS[0], defect(monkeypatch), {}, 3)
    places = [len(forms), len(others) // 2]
    requests = [*others[: places[0]], bad, *others[places[0] : places[1]], bad, *others[places[1] :]]
    found = serve(busy, requests)
    for place in (places[1] + 1, places[0]):
        failed = found.pop(place)
        assert isinstance(failed, RequestOutput)
        assert failed.error_code == "engine_failed"
        assert "could not be sampled (RuntimeError: index" in (failed.error or "")
    for one, output, alone in zip(others, found, expected, strict=True):
        if isinstance(alone, RequestOutput) and isinstance(output, RequestOutput):
            assert told(output) == told(alone), one
        else:
            assert output == alone
    assert busy.usage().used == 0


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.slow if seed == 100 else pytest.mark.exhaustive) for seed in range(100, 104)],
)
def test_any_parameters_in_any_company_at_length(quiet: LLM, busy: LLM, seed: int) -> None:
    random = Random(seed)
    for _ in range(8):
        check(quiet, busy, [asked(random) for _ in range(random.choice((3, 12, 30, 60)))], {})
