"""Tokenization in threads: long texts do not delay short ones, and no request is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import AsyncLLM, SamplingParams
from quire.engine.inputs.request_builder import PreparedRequest, RequestBuilder
from quire.engine.inputs.tokenizer_pool import FEW_CHARS, MANY_CHARS, SHORT_THREADS, TokenizerPool
from quire.errors import InvalidParameter, PromptTooLong, QueueFull, UnsupportedFeature, WorkerError
from tests.engine.test_async_llm import load, scenario, text_of
from tests.engine.test_llm import greedy

LONG = "one two three " * 10_000
MIDDLE = "one two three " * 200


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    llm = load()
    yield llm
    llm.shutdown()


@pytest.fixture
def texts(llm: AsyncLLM) -> Iterator[TokenizerPool]:
    """Threads whose work waits for nobody else's."""
    texts = TokenizerPool(llm._engine.requests, llm.tokenizer, 10**6)
    yield texts
    texts.close()


@scenario
async def test_short_texts_do_not_wait_for_long_ones(texts: TokenizerPool) -> None:
    may_end = threading.Event()
    long = [asyncio.create_task(texts.run(MANY_CHARS + 1, may_end.wait)) for _ in range(20)]
    blocked = [asyncio.create_task(texts.run(MANY_CHARS, may_end.wait)) for _ in range(SHORT_THREADS - 1)]
    await asyncio.sleep(0)
    assert await texts.encode(MIDDLE) == texts._known_tokenizer.encode(MIDDLE)
    assert await texts.encode("short") == texts._known_tokenizer.encode("short")
    assert not any(task.done() for task in (*long, *blocked))
    may_end.set()
    await asyncio.gather(*long, *blocked)


@scenario
async def test_long_texts_go_one_after_the_other(texts: TokenizerPool) -> None:
    num_running, most = 0, 0

    def work() -> None:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        threading.Event().wait(0.002)
        num_running -= 1

    await asyncio.gather(*(texts.run(MANY_CHARS + 1, work) for _ in range(10)))
    assert most == 1


@scenario
async def test_texts_that_wait_are_bounded_together(texts: TokenizerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.inputs.tokenizer_pool.MAX_WAITING_CHARS", 3 * (MANY_CHARS + 1))
    may_end = threading.Event()
    waiting = [asyncio.create_task(texts.run(MANY_CHARS + 1, may_end.wait)) for _ in range(3)]
    await asyncio.sleep(0)
    message = {"role": "user", "content": [{"type": "text", "text": "word "}, {"type": "text", "text": "x"}]}
    for refused in (texts.run(MANY_CHARS + 1, may_end.wait), texts.render([message]), texts.encode(LONG)):
        with pytest.raises(QueueFull, match="wait to be made into tokens; retry"):
            await refused
    assert await texts.encode(MIDDLE)
    may_end.set()
    await asyncio.gather(*waiting)
    assert await texts.encode(LONG)


@scenario
async def test_the_event_loop_and_the_engine_go_on_beside_a_long_text(llm: AsyncLLM, texts: TokenizerPool) -> None:
    long = asyncio.create_task(texts.encode("word, " * 400_000))
    alone = await text_of(llm, "Once upon a time", greedy())
    assert not long.done()
    assert alone
    assert len(await long) == len(texts._known_tokenizer.encode("word, " * 400_000))


@scenario
async def test_what_a_door_prepares_is_what_the_engine_would_have_read(llm: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, bad_words=("the",))
    prompts: list[Any] = ["Once upon a time", [5, 6, 7], {"prompt": "a b"}, {"prompt_token_ids": [8]}]
    prepared = await llm.texts.prepare(prompts, params)
    assert [each.prompt.text for each in prepared] == ["Once upon a time", None, "a b", None]
    for prompt, each in zip(prompts, prepared, strict=True):
        assert isinstance(each, PreparedRequest)
        assert await text_of(llm, each, params) == await text_of(llm, prompt, params)
    assert len({id(each.words) for each in prepared}) == 1, "parameters of one request are read once"


@scenario
async def test_the_engine_s_thread_reads_no_texts(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: set[str] = set()
    prepare = RequestBuilder.prepare

    def noted(self: RequestBuilder, *args: Any, **kwargs: Any) -> PreparedRequest:
        readers.add(threading.current_thread().name)
        return prepare(self, *args, **kwargs)

    monkeypatch.setattr(RequestBuilder, "prepare", noted)
    params = SamplingParams(max_tokens=1, bad_words=("word " * 200,) * 10)
    await text_of(llm, MIDDLE[: FEW_CHARS // 2], params)
    with pytest.raises(PromptTooLong):
        await text_of(llm, LONG, params)
    with pytest.raises(UnsupportedFeature, match="pin_limit"):
        await llm.pin_prefix("a", MIDDLE[: FEW_CHARS // 2])
    assert readers
    assert "quire-engine" not in readers


@pytest.mark.parametrize("prompt", ["", [], [-1], [10**6], ["a"], [True], [1.5], None, 3, b"a", {"prompt": [1]}, LONG])
@scenario
async def test_a_prompt_that_is_refused_holds_no_place(llm: AsyncLLM, prompt: Any) -> None:
    with pytest.raises((InvalidParameter, PromptTooLong)):
        await text_of(llm, prompt, greedy(), add_special_tokens=False)
    assert llm._slots.num_waiting == 0


@scenario
async def test_a_text_is_refused_at_the_context_length(llm: AsyncLLM) -> None:
    most = llm.resolved.max_model_len
    with pytest.raises(
        PromptTooLong, match=rf"at least \d+ tokens but the context length of {most} .* most {most - 1}"
    ):
        await text_of(llm, LONG, greedy())
    with pytest.raises(PromptTooLong, match=f"has {most} tokens"):
        await text_of(llm, [5] * most, greedy())
    with pytest.raises(PromptTooLong, match=f"at most {most}$"):
        await llm.texts.encode(LONG)
    assert len(await llm.texts.encode("a" * 50)) > 1


@scenario
async def test_who_waits_for_a_thread_is_told_of_the_end(llm: AsyncLLM) -> None:
    texts = TokenizerPool(llm._engine.requests, llm.tokenizer, 10**6)
    may_end = threading.Event()
    running = asyncio.create_task(texts.run(MANY_CHARS + 1, may_end.wait))
    waiting = asyncio.create_task(texts.run(MANY_CHARS + 1, may_end.wait))
    await asyncio.sleep(0.05)
    texts.close()
    may_end.set()
    assert await running
    for late in (waiting, texts.run(MANY_CHARS + 1, may_end.wait)):
        with pytest.raises(WorkerError, match="shut down"):
            await late


GIVES_BACK = """
import threading
from quire.platform.malloc import return_freed_memory
from quire.platform.malloc import keep_freed_memory

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) >> 8

assert keep_freed_memory()
before = resident_mib()
def work():
    for _ in range(3):
        blocks = [bytearray(b"x" * 200_000) for _ in range(200)]
        del blocks
    print(resident_mib() - before)
    return_freed_memory()
    print(resident_mib() - before)
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_a_thread_gives_back_what_was_kept_for_tensors(run_script: Callable[[str], str]) -> None:
    kept, left = map(int, run_script(GIVES_BACK).split())
    assert kept > 30
    assert left < 8


@pytest.fixture
def run_script() -> Callable[[str], str]:
    def run(script: str) -> str:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout

    return run
