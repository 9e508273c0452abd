"""Many threads call the asynchronous interface: invariants hold at each memory command, and no answer changes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from pathlib import Path

from quire import AsyncLLM, SamplingParams
from quire.engine.outputs.outputs import RequestOutput
from quire.memory.recording.replay import replay
from tests.engine.test_llm import STORIES

NUM_CALLERS = 6
NUM_REQUESTS = 6
MAX_TOKENS = 40
SALTS = (None, "tenant")


def params(n: int) -> SamplingParams:
    """Return greedy parameters: all samples of a story are the same in any company."""
    return SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, n=n, ignore_eos=True)


async def texts_of(llm: AsyncLLM, story: str, n: int, salt: str | None, leave_after: int | None) -> list[str]:
    """Return the samples' texts; as far as they were when the caller left, if it does."""
    texts = [""] * n
    outputs = llm.generate(story, params(n), cache_salt=salt)
    num_outputs = 0
    async for output in outputs:
        add_news(texts, output)
        num_outputs += 1
        if num_outputs == leave_after:
            break
    await outputs.aclose()  # type: ignore[attr-defined]
    return texts


def add_news(texts: list[str], output: RequestOutput) -> None:
    for sample in output.outputs:
        texts[sample.index] += sample.text


def caller(llm: AsyncLLM, seed: int, expected: dict[str, str]) -> Callable[[], None]:
    """Return one client's life: requests side by side, some left early, and questions and resets in between."""

    async def ask(rng: random.Random) -> None:
        story, n = rng.choice(STORIES), rng.choice((1, 1, 2, 3))
        leave_after = rng.choice((None, None, 1, 5))
        texts = await texts_of(llm, story, n, rng.choice(SALTS), leave_after)
        for text in texts:
            assert expected[story].startswith(text)
            assert leave_after is not None or text == expected[story]

    async def live() -> None:
        rng = random.Random(seed)
        for _ in range(NUM_REQUESTS // 3):
            await asyncio.gather(*(ask(rng) for _ in range(3)))
            usage = llm.usage()
            assert 0 <= usage.used <= usage.num_blocks
            assert llm.stats().num_steps >= 0
            assert llm.health().is_alive
            if rng.random() < 0.3:
                llm.reset_prefix_cache()

    return lambda: asyncio.run(asyncio.wait_for(live(), timeout=300))


def test_callers_in_many_threads_keep_every_invariant(tmp_path: Path) -> None:
    log = tmp_path / "memory.log"
    # A pool in which a few requests fill everything: sequences are preempted and blocks evicted all the time.
    llm = AsyncLLM.from_options(
        dtype="float32",  # rounding to bfloat16 leaves ties between words, which the batch decides
        num_threads=1,
        num_kv_blocks=30,
        block_size=4,
        max_model_len=120,
        max_num_seqs=16,
        record_memory=str(log),
    )
    try:
        expected = {story: asyncio.run(texts_of(llm, story, 1, None, None))[0] for story in STORIES}
        failures: list[BaseException] = []

        def run(live: Callable[[], None]) -> None:
            try:
                live()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(caller(llm, seed, expected),)) for seed in range(NUM_CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        num_preemptions = llm.stats().num_preemptions
    finally:
        llm.shutdown()
    assert num_preemptions > 0, "nobody ran out of memory: the test proves little"
    with log.open(encoding="utf-8") as lines:
        report = replay(lines)
    assert report.fault is None
    assert report.num_sequences >= NUM_CALLERS * NUM_REQUESTS
    assert report.usage.used == 0
