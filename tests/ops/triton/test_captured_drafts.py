"""Decodes whose drafts are verified, and passes of draft models, by captured steps: their tokens are transformers'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.execution.capture.graph_ladder import ReplayedStep
from quire.execution.drafts.draft_model import DraftModel
from quire.execution.runners.runner import ModelRunner
from quire.memory import check
from quire.scheduling.plan import ScheduledSequence
from tests.conformance.conftest import Reference, make_reference
from tests.conformance.test_draft_model import noisy_copy
from tests.conformance.test_drafts import Oracle
from tests.ops.triton.device import MARKS
from tests.ops.triton.test_engine import load

pytestmark = MARKS

NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Steps of two sequences with up to four drafts each, and more tokens where a state goes back.
SIZES: dict[str, Any] = {"cudagraph_capture_sizes": (2, 6, 12), "max_num_seqs": 4}


def runner_of(llm: LLM) -> ModelRunner:
    runner = llm.engine.executor._runner  # type: ignore[attr-defined]
    assert isinstance(runner, ModelRunner)
    return runner


def with_oracle(reference: Reference, **options: Any) -> LLM:
    """Load a model whose drafts are mostly right."""
    llm = load(str(reference.folder), reference.pool_factor, speculative_method="ngram", **(SIZES | options))
    texts = [prompt + output for prompt, output in zip(reference.prompts, reference.outputs, strict=True)]
    llm.engine.scheduler.drafts.drafter = Oracle(texts, llm.resolved.vocab_size)
    return llm


def assert_greedy(llm: LLM, reference: Reference) -> None:
    outputs = llm.generate(reference.prompts[:2], GREEDY, use_tqdm=False)
    for output, expected in zip(outputs, reference.outputs, strict=False):
        assert list(output.outputs[0].token_ids[: len(expected)]) == list(expected[:NUM_TOKENS])
    assert 0 < llm.stats.num_accepted_tokens < llm.stats.num_draft_tokens
    check(llm.engine.scheduler.memory)


@pytest.mark.parametrize("name", ["llama3", "gemma3", "llama4", "falcon-h1", "qwen3.5"])
def test_drafts_are_verified_by_captured_steps(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whole attention, windows, chunks, and states that go back where a draft is wrong."""
    reference = make_reference(name, tmp_path_factory)
    llm = with_oracle(reference)
    runner = runner_of(llm)
    assert_greedy(llm, reference)
    assert runner.captured.num_replayed >= 3


@pytest.mark.parametrize(("name", "is_async"), [("llama3", True), ("llama3", False), ("qwen3.5", False)])
def test_passes_of_a_draft_model_are_captured(
    name: str,
    is_async: bool,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cache groups come behind the target's; both have states, or both have none."""
    reference = make_reference(name, tmp_path_factory)
    draft = noisy_copy(reference.folder, tmp_path_factory.mktemp("noisy"))
    llm = load(
        str(reference.folder),
        3 * reference.pool_factor,
        speculative_method="draft",
        draft_model=str(draft),
        num_speculative_tokens=3,
        async_scheduling=is_async,
        **(SIZES | {"cudagraph_capture_sizes": (2, 6, 16)}),
    )
    llm.engine.step_recorder.speculation = None
    speculation: Any = llm.engine.scheduler.drafter
    speculation.step_costs = [1.0] * len(speculation.step_costs)
    runner = runner_of(llm)
    assert isinstance(runner.draft, DraftModel)
    assert runner.draft._ladder is not None
    ladder, num_rows = runner.draft._ladder, list[int]()
    run = ladder.run

    def run_seen(rows: Sequence[ScheduledSequence], *args: Any) -> ReplayedStep:
        num_rows.append(len(rows))
        return run(rows, *args)

    monkeypatch.setattr(ladder, "run", run_seen)
    assert_greedy(llm, reference)
    assert runner.captured.num_replayed >= 3
    assert len(num_rows) >= 9
