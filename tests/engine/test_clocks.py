"""Outputs do not depend on the clock: one that stands still, runs backwards, jumps or is no number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest

from quire import LLM, SamplingParams
from quire.engine.metrics.block_lifetimes import PoolLifetimes

PROMPTS = [f"{name} said: the fox, the fox, the" for name in ("Tom", "Anna", "A cow", "The old sailor", "A bee", "He")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
CLOCKS: dict[str, Callable[[], Callable[[], float]]] = {
    "right": lambda: itertools.count(0, 0.01).__next__,
    "still": lambda: lambda: 5.0,
    "backwards": lambda: itertools.count(0, -0.5).__next__,
    "jumping": lambda: itertools.cycle([-1e300, 1e300, 0.0]).__next__,
    "not a number": lambda: lambda: math.nan,
}


def tokens_by(clock: Callable[[], float]) -> list[list[int]]:
    llm = LLM(
        num_threads=1,
        max_model_len=128,
        num_kv_blocks=20,
        dtype="float32",
        swap_space=1 << 22,
        speculative_method="suffix",
        max_inter_token_ms=5.0,
    )
    engine = llm.engine
    engine._clock = clock
    for group in engine.scheduler.memory.groups:
        assert isinstance(group.pool.observer, PoolLifetimes)
        group.pool.observer._clock = clock
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert engine.stats.num_preemptions > 0
    assert llm.usage().used == 0
    llm.close()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The tokens by a clock that is right."""
    return tokens_by(CLOCKS["right"]())


@pytest.mark.parametrize("name", [name for name in CLOCKS if name != "right"])
def test_what_comes_out_does_not_depend_on_the_clock(name: str, expected: list[list[int]]) -> None:
    assert tokens_by(CLOCKS[name]()) == expected
