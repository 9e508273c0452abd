"""Grammars in a process of their own, as those of large vocabularies are, with the bundled model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from quire.engine.engine import Engine
from quire.engine.startup import loading
from quire.text.structured.grammar_process import GrammarProcess
from quire.text.structured.state_table import LOST
from tests.engine.bundled import load
from tests.engine.structured_forms import CHOICES, WANTED
from tests.engine.test_structured import STORY, run, twelve, wild

FORM = StructuredOutputs(**WANTED["compact"])
FORMS = [StructuredOutputs(regex=f"([a-z]+ ){{{count},}}[.]") for count in (200, 1)]


@pytest.fixture(autouse=True)
def is_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "open_grammars", GrammarProcess)


@pytest.fixture
def llm() -> Iterator[LLM]:
    llm = load(num_kv_blocks=20, max_model_len=192)
    yield llm
    assert llm.usage().used == 0
    llm.close()


def pid_of(engine: Engine) -> int:
    assert engine.grammars is not None
    process = engine.grammars.grammars
    assert isinstance(process, GrammarProcess)
    return process.start()._process.pid


def token_ids(llm: LLM) -> list[list[list[int]]]:
    """Return the outputs of forked, preempted and free sequences, and of beams."""
    prompts, _ = twelve()
    each = [wild(kind, seed=seed, n=2, max_tokens=40) for seed, kind in enumerate(sorted(WANTED) * 2)][:8]
    beams = SamplingParams(beam_width=3, n=3, max_tokens=40, temperature=0.0, structured_outputs=FORM)
    outputs = run(llm, [*prompts[:8], STORY, STORY], [*each, beams, SamplingParams(max_tokens=30, seed=1)])
    assert not any(output.error for output in outputs)
    return [[sample.token_ids for sample in output.outputs] for output in outputs]


def test_outputs_are_those_of_grammars_in_the_engines_process(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    apart = token_ids(llm)
    assert llm.stats.num_preemptions > 0
    monkeypatch.undo()
    local = load()
    assert token_ids(local) == apart
    local.close()


def test_a_process_whose_pipes_are_closed_has_ended_before_the_system_says_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(llm, STORY, wild("choice"))
    assert llm.engine.grammars is not None
    process = llm.engine.grammars.grammars
    assert isinstance(process, GrammarProcess)
    pipes = process.start()
    # The system closes a killed process's pipes first, and says later that it has ended.
    monkeypatch.setattr(pipes._process, "poll", lambda: None)
    os.kill(pipes._process.pid, signal.SIGKILL)
    (lost,) = run(llm, STORY, wild("choice"))
    assert lost.error == LOST
    (output,) = run(llm, STORY, wild("choice"))
    assert output.outputs[0].text in CHOICES


def test_the_process_ends_with_the_engine() -> None:
    llm = load()
    run(llm, STORY, wild("choice"))
    pid = pid_of(llm.engine)
    os.kill(pid, 0)
    llm.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_killed_process_ends_its_requests_and_the_next_grammar_starts_another() -> None:
    async def collect(llm: AsyncLLM, form: StructuredOutputs | None, begun: asyncio.Event) -> tuple[str | None, int]:
        params = SamplingParams(max_tokens=400, ignore_eos=form is None, seed=4, structured_outputs=form)
        num_tokens, error = 0, None
        async for output in llm.generate([5, 6, 7], params):
            num_tokens, error = num_tokens + len(output.outputs[0].token_ids), output.error
            begun.set()
        return error, num_tokens

    async def serve() -> None:
        async with AsyncLLM.from_options(num_kv_blocks=256, num_threads=1, max_model_len=512) as llm:
            begun = [asyncio.Event(), asyncio.Event()]
            forms = (FORMS[0], None)
            tasks = [asyncio.create_task(collect(llm, *each)) for each in zip(forms, begun, strict=True)]
            await asyncio.gather(*(one.wait() for one in begun))
            os.kill(pid_of(llm._engine), signal.SIGKILL)
            (error, _), (other, num_tokens) = await asyncio.gather(*tasks)
            assert error == LOST
            assert (other, num_tokens) == (None, 400)
            # One that is aborted while its grammar is compiled, by the next process.
            aborted = asyncio.create_task(collect(llm, FORMS[1], asyncio.Event()))
            await asyncio.sleep(0.05)
            aborted.cancel()
            with pytest.raises(asyncio.CancelledError):
                await aborted
            text = ""
            async for output in llm.generate(STORY, wild("choice")):
                text += output.outputs[0].text
            assert text in CHOICES

    asyncio.run(serve())
