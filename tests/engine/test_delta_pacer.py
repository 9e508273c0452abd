"""Deltas of several steps go to a busy event loop together, those to an idle one at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import chain, count
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM
from quire.engine.async_commands import LOOP_SHARE, MAX_HOLD_S, DeltaPacer, Stream, post_items
from quire.engine.async_llm import AsyncLLM
from quire.engine.engine_thread import EngineThread
from quire.engine.outputs.mailbox import Item
from quire.engine.outputs.outputs import CompletionOutput, RequestOutput
from quire.errors import WorkerError
from quire.sequences.params import SamplingParams


class Times:
    """The clocks of a pacer, which stand still until they are set."""

    now_s = 0.0
    used_s = 0.0

    def pacer(self) -> DeltaPacer:
        return DeltaPacer(lambda: self.now_s, lambda: self.used_s)


@pytest.mark.parametrize("busy_s", [0.0, 0.001, 0.002, 1.0])
def test_the_interval_is_a_multiple_of_the_work_since_the_last_post(busy_s: float) -> None:
    times = Times()
    pacer = times.pacer()
    assert not pacer.may_hold()
    pacer.on_arrival()
    pacer.on_post()
    times.used_s = busy_s
    pacer.on_arrival()
    interval_s = min(busy_s / LOOP_SHARE, MAX_HOLD_S)
    times.now_s = 0.99 * interval_s
    assert pacer.may_hold() == (busy_s > 0)
    times.now_s = interval_s
    assert not pacer.may_hold()


def generated(llm: AsyncLLM, num_tokens: int, may_hold: Callable[[], bool]) -> list[list[int]]:
    """Return the tokens of each delta of a request."""
    llm._thread._pacer.may_hold = may_hold  # type: ignore[method-assign]

    async def scenario() -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [delta.outputs[0].token_ids async for delta in llm.generate("Once", params)]

    return asyncio.run(scenario())


def test_held_deltas_lose_no_token_and_neither_the_first_nor_the_last_waits() -> None:
    llm = AsyncLLM.from_options("bundled", num_kv_blocks=64, num_threads=1, enable_prefix_caching=False)
    try:
        at_once = generated(llm, 12, lambda: False)
        held = generated(llm, 12, lambda: True)
        steps = count(1)
        some = generated(llm, 12, lambda: next(steps) % 3 != 0)
    finally:
        llm.shutdown()
    tokens = [*chain.from_iterable(at_once)]
    assert [*chain.from_iterable(held)] == [*chain.from_iterable(some)] == tokens
    assert len(tokens) == 12
    # The first delta and the last, which has all that were held; a slow reader may get them as one.
    assert len(held) <= 2
    assert len(held[-1]) >= 11


def test_nothing_waits_for_a_step_with_a_prompt() -> None:
    """Not for one of a request that waits, nor for the rest of a prompt that is computed in chunks."""
    with closing(LLM("bundled", num_kv_blocks=64, num_threads=1, max_num_batched_tokens=16, max_num_seqs=4)) as llm:
        engine = llm.engine
        thread: Any = SimpleNamespace(_engine=engine, _pacer=SimpleNamespace(may_hold=lambda: True))
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        engine.add_request("first", {"prompt_token_ids": [5] * 8}, params)
        engine.step()
        assert EngineThread._may_hold(thread)
        engine.add_request("second", {"prompt_token_ids": [7] * 40}, params)
        for _ in range(3):  # 15 tokens of the prompt a step
            assert not EngineThread._may_hold(thread)
            engine.step()
        assert EngineThread._may_hold(thread)


def test_items_of_one_post_are_delivered_in_order_by_one_call_of_the_loop() -> None:
    async def scenario() -> list[tuple[str, Item]]:
        got: list[tuple[str, Item]] = []
        loop = asyncio.get_running_loop()
        streams = [
            Stream(name, lambda _: None, loop, partial(lambda name, item: got.append((name, item)), name))
            for name in "ab"
        ]

        def delta(stream: Stream, token_id: int) -> tuple[Stream, Item]:
            output = CompletionOutput(0, text=f"{token_id} ", token_ids=[token_id])
            return stream, RequestOutput(stream.request_id, prompt=None, prompt_token_ids=[], outputs=[output])

        error = WorkerError("broken")
        items: list[tuple[Stream, Item]] = [*(delta(stream, 7) for stream in streams), (streams[0], error)]
        post_items(items)
        assert not got, "delivered by the engine's thread"
        await asyncio.sleep(0)
        assert got == [(stream.request_id, item) for stream, item in items]
        return got

    assert len(asyncio.run(scenario())) == 3
