"""Pins and retention hints through the Python interface, on the bundled model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.inputs.prompts import Prompt
from quire.errors import (
    ConfigError,
    InvalidParameter,
    PinLimitReached,
    PromptTooLong,
    RequestError,
    UnsupportedFeature,
    WorkerError,
)
from quire.memory import check
from tests.engine.test_async_llm import idle, scenario
from tests.engine.test_async_llm import load as load_async
from tests.engine.test_llm import Failing, load

SYSTEM = list(range(10, 60))
ONE = SamplingParams(temperature=0.0, max_tokens=1)


def fill(llm: LLM, *, retain_cache: bool = False, salt: str | None = None, rounds: int = 3) -> None:
    """Run prompts that together need the whole pool, several times over."""
    for start in range(rounds):
        prompts: list[Prompt] = [[100 + start * 10 + i] * 200 for i in range(6)]
        llm.generate(prompts, ONE, use_tqdm=False, cache_salt=salt, retain_cache=retain_cache)


def num_cached(llm: LLM, prompt: list[int], salt: str | None = None) -> int:
    (output,) = llm.generate([prompt], ONE, use_tqdm=False, cache_salt=salt)
    assert output.num_cached_tokens is not None
    return output.num_cached_tokens


@pytest.fixture
def llm() -> Iterator[LLM]:
    llm = load(num_kv_blocks=64, pin_limit=0.125)
    yield llm
    check(llm.engine.scheduler.memory)
    llm.close()


def test_a_pinned_prefix_is_hit_whatever_comes_between(llm: LLM) -> None:
    assert llm.pin_prefix("system", SYSTEM) == 48
    fill(llm)
    assert num_cached(llm, SYSTEM) == 48
    assert llm.usage().used == 3
    llm.unpin_prefix("system")
    fill(llm)
    assert num_cached(llm, SYSTEM) == 0
    assert llm.usage().used == 0


def test_what_is_cached_is_pinned_without_a_request(llm: LLM) -> None:
    llm.generate([SYSTEM], ONE, use_tqdm=False)
    before = llm.stats.num_steps
    assert llm.pin_prefix("a", SYSTEM) == 48
    assert llm.pin_prefix("b", SYSTEM[:40]) == 32
    assert llm.stats.num_steps == before
    assert llm.kv_report().pins == (8, 3, {"a": 48, "b": 32})


def test_a_salt_has_pins_of_its_own(llm: LLM) -> None:
    assert llm.pin_prefix("system", SYSTEM, cache_salt="tenant") == 48
    fill(llm, salt="tenant")
    assert num_cached(llm, SYSTEM) == 0
    assert num_cached(llm, SYSTEM, "tenant") == 48


def test_a_tenant_has_pins_of_its_own(llm: LLM) -> None:
    """Names too: no two pins are one, however they are named."""
    pins: list[tuple[str | None, str]] = [(None, "a"), ("a", "a"), ("b", "a"), (None, "a/b"), ("a", "b"), ("a/b", "c")]
    for tenant, name in pins:
        assert llm.pin_prefix(name, SYSTEM[:16], tenant=tenant) == 16
    assert list(llm.kv_report().pins.tokens) == ["a", "a/a", "b/a", "/a/b", "a/b", "a%2Fb/c"]
    fill(llm)
    for tenant, cached in ((None, 16), ("a", 16), ("c", 0)):
        (output,) = llm.generate([SYSTEM], ONE, use_tqdm=False, tenant=tenant)
        assert output.num_cached_tokens == cached
    with pytest.raises(InvalidParameter, match="the name of a pinned prefix"):
        llm.unpin_prefix("c", tenant="a")
    for tenant, name in pins:
        llm.unpin_prefix(name, tenant)
    assert llm.kv_report().pins.tokens == {}


def test_every_mistake_has_its_error_and_pins_nothing(llm: LLM) -> None:
    llm.pin_prefix("system", SYSTEM)
    with pytest.raises(InvalidParameter, match="not in use"):
        llm.pin_prefix("system", SYSTEM)
    with pytest.raises(InvalidParameter, match="the name of a pinned prefix"):
        llm.unpin_prefix("other")
    with pytest.raises(InvalidParameter, match="16 tokens"):
        llm.pin_prefix("other", SYSTEM[:15])
    with pytest.raises(PromptTooLong):
        llm.pin_prefix("other", [5] * 512)
    with pytest.raises(PinLimitReached) as caught:
        llm.pin_prefix("other", [5] * 100)
    assert (caught.value.needed, caught.value.limit, caught.value.code) == (9, 8, "pin_limit_reached")
    for name in ("", 5, None, "x" * 257):
        with pytest.raises(InvalidParameter, match="1 to 256 characters"):
            llm.pin_prefix(name, SYSTEM)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="cache_salt"):
        llm.pin_prefix("other", SYSTEM, cache_salt="")
    for tenant in ("", 5):
        with pytest.raises(InvalidParameter, match="tenant"):
            llm.pin_prefix("other", SYSTEM, tenant=tenant)  # type: ignore[arg-type]
        with pytest.raises(InvalidParameter, match="tenant"):
            llm.unpin_prefix("system", tenant)  # type: ignore[arg-type]
    assert llm.engine.pins.report().tokens == {"system": 48}


@pytest.mark.parametrize(
    ("options", "words"), [({}, "pin_limit above 0"), ({"enable_prefix_caching": False}, "prefix caching is off")]
)
def test_an_engine_that_cannot_pin_says_so(options: dict[str, Any], words: str) -> None:
    llm = load(**options)
    with pytest.raises(UnsupportedFeature, match=words):
        llm.pin_prefix("system", SYSTEM)
    with pytest.raises(UnsupportedFeature, match=words):
        llm.unpin_prefix("system")
    llm.close()


def test_a_reset_lets_go_of_pins(llm: LLM) -> None:
    llm.pin_prefix("system", SYSTEM)
    llm.reset_prefix_cache()
    assert llm.engine.pins.report() == (8, 0, {})
    assert (llm.usage().used, num_cached(llm, SYSTEM)) == (0, 0)
    assert llm.pin_prefix("system", SYSTEM) == 48


def test_a_prompt_that_cannot_be_computed_is_not_pinned(llm: LLM) -> None:
    honest = llm.engine.executor
    llm.engine.executor = Failing(honest, {llm.engine.num_steps})
    with pytest.raises(WorkerError, match="'system' could not be computed"):
        llm.pin_prefix("system", SYSTEM)
    llm.engine.executor = honest
    assert llm.engine.pins.report().tokens == {}


def test_pins_may_not_crowd_out_the_longest_sequence() -> None:
    with pytest.raises(ConfigError, match="lower pin_limit or max_model_len") as caught:
        load(num_kv_blocks=40, pin_limit=0.25)
    assert caught.value.field == "pin_limit"
    assert "leaves 30 of 40" in str(caught.value)
    load(num_kv_blocks=40, pin_limit=0.2).close()


# ---- hints ----


@pytest.mark.parametrize(("share", "expected"), [(0.25, len(SYSTEM) - 1), (0.0, 0)])
def test_a_retained_conversation_outlives_others(share: float, expected: int) -> None:
    llm = load(num_kv_blocks=64, retention_limit=share)
    llm.generate([SYSTEM], ONE, use_tqdm=False, retain_cache=True)
    fill(llm)
    assert num_cached(llm, SYSTEM) == expected
    # Its share is bounded: who retains everything pushes out what was retained before, nobody else.
    fill(llm, retain_cache=True)
    assert num_cached(llm, SYSTEM) == 0
    check(llm.engine.scheduler.memory)
    llm.close()


def test_a_hint_is_a_boolean(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match="retain_cache must be true or false"):
        llm.generate([SYSTEM], ONE, use_tqdm=False, retain_cache=1)  # type: ignore[arg-type]


# ---- behind an event loop ----


@scenario
async def test_pins_from_tasks_while_others_run() -> None:
    llm = load_async(pin_limit=0.125, num_kv_blocks=64)
    try:
        long = SamplingParams(max_tokens=100, ignore_eos=True)

        async def talk(i: int) -> None:
            async for _ in llm.generate([60 + i] * 100, long):
                pass

        talks = [asyncio.create_task(talk(i)) for i in range(6)]
        assert await asyncio.gather(llm.pin_prefix("a", SYSTEM), llm.pin_prefix("b", SYSTEM[:32])) == [48, 32]
        for problem in (llm.pin_prefix("a", SYSTEM), llm.unpin_prefix("c"), llm.pin_prefix("d", [5] * 120)):
            with pytest.raises(RequestError):
                await problem
        await asyncio.gather(*talks)
        assert llm.kv_report().pins == (8, 3, {"a": 48, "b": 32})
        cached = [delta.num_cached_tokens async for delta in llm.generate(SYSTEM, ONE, retain_cache=True)]
        assert cached == [48]
        # The tail too.
        assert llm.kv_report().retained_bytes == 4 * llm.resolved.bytes_per_block
        await llm.unpin_prefix("a")
        await llm.unpin_prefix("b")
        assert await idle(llm)
    finally:
        llm.shutdown()
    with pytest.raises(WorkerError):
        await llm.pin_prefix("e", SYSTEM)


@scenario
async def test_two_who_pin_the_same_name_at_once_do_not_both_get_it() -> None:
    llm = load_async(pin_limit=0.125, num_kv_blocks=64)
    try:
        found = await asyncio.gather(llm.pin_prefix("a", SYSTEM), llm.pin_prefix("a", [7] * 50), return_exceptions=True)
        assert sorted(map(str, (isinstance(item, InvalidParameter) for item in found))) == ["False", "True"]
        assert list(llm.kv_report().pins.tokens) == ["a"]
    finally:
        llm.shutdown()
