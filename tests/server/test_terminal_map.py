"""The block map in the terminal, rendered from the blocks of a real engine while it runs."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from rich.console import Console

from quire.engine.async_llm import AsyncLLM
from quire.sequences.params import SamplingParams
from quire.server.kv_views.block_map import BlockMapHub
from quire.server.operations.terminal_map import cell, show_in_terminal

# Neighbours, which the legend does not have.
SHARED, IDLE = "\u25a3" * 2, "\u25aa" * 2


def test_states_have_characters_of_their_own() -> None:
    marks = [cell(state, owner) for state, owner in ((0, 0), (1, 0), (5, 1), (9, 1), (4, 0), (7, 0))]
    assert len(set(marks)) == len(marks)
    assert cell(5, 1)[1] != cell(5, 2)[1]


def test_frames_follow_a_running_request(folder: Path) -> None:
    written = io.StringIO()

    async def run() -> None:
        console = Console(file=written, width=60, height=12, force_terminal=True, color_system=None)
        async with AsyncLLM.from_options(str(folder), num_kv_blocks=600, num_threads=1) as llm:
            is_over = False
            shown = asyncio.create_task(show_in_terminal(BlockMapHub(llm, lambda: is_over), console))
            params = SamplingParams(max_tokens=3500, ignore_eos=True, n=2)
            async for _ in llm.generate({"prompt_token_ids": [7] * 100}, params):
                if SHARED in written.getvalue():
                    break
            async with asyncio.timeout(60):
                while IDLE not in written.getvalue():
                    await asyncio.sleep(0.02)
                is_over = True
                await shown

    asyncio.run(run())
    text = written.getvalue()
    # Two samples share the prompt's blocks, and leave idle ones.
    assert "2 running, 0 queued, 0 swapped" in text
    assert SHARED in text
    assert IDLE in text
