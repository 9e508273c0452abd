"""The first grammar of a server with a vocabulary of 262,000 tokens: it is opened where no stream waits for it."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire import AsyncLLM, SamplingParams
from quire.sequences.structured import StructuredOutputs
from tests.lock_holds import watch_holds

# Seconds of processor time. llguidance holds the interpreter lock for two of them while it opens the tokenizer, and the
# library of tokenizers for 0.2 while it writes it.
LONGEST_HOLD_S = 0.15
# What opening the tokenizer takes in each of two processes: 2.2 s where this was written.
MAX_OPENING_S = 6.0
WANTED = StructuredOutputs(json={"type": "object", "properties": {"a": {"enum": ["b", "cd"]}}, "required": ["a"]})


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM.from_options(str(folder), num_threads=1, max_num_seqs=4, max_model_len=2048, num_kv_blocks=256)
    async with llm:
        yield llm


async def stream_beside_the_first_grammar(llm: AsyncLLM) -> tuple[str, int]:
    """Return the output of a grammar, and the number of tokens that a stream got while it was opened."""
    num_tokens, is_over = 0, asyncio.Event()

    async def stream() -> None:
        nonlocal num_tokens
        async for _ in llm.generate([5, 6, 7], SamplingParams(max_tokens=2000, ignore_eos=True, temperature=1.0)):
            num_tokens += 1
            if is_over.is_set():
                break

    running = asyncio.create_task(stream())
    while num_tokens < 3:
        await asyncio.sleep(0.01)
    params, text, before = SamplingParams(max_tokens=64, structured_outputs=WANTED), "", num_tokens
    async for output in llm.generate([1, 2, 3], params):
        text += output.outputs[0].text
    is_over.set()
    await running
    return text, num_tokens - before


def test_the_first_grammar_stops_no_stream(byte_fallback_folder: Path) -> None:
    async def scenario() -> tuple[str, int]:
        async with serving(byte_fallback_folder) as llm:
            with watch_holds() as holds:
                answer = await stream_beside_the_first_grammar(llm)
            assert holds.longest_s < LONGEST_HOLD_S
        return answer

    before_s = sum(os.times()[2:4])
    text, num_tokens = asyncio.run(scenario())
    assert re.fullmatch(r'\{\s*"a"\s*:\s*"(b|cd)"\s*\}', text)
    assert num_tokens > 20, "the stream went on"
    assert sum(os.times()[2:4]) - before_s < 2 * MAX_OPENING_S
