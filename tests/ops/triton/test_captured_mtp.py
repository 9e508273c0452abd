"""Captured passes of an MTP head: each is what it is where it is launched, and its drafts are those of a slow twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.execution.capture.graph_ladder import GraphLadder
from quire.execution.drafts.mtp_drafter import MTPDrafter
from quire.execution.step.kv_storage import KVStorage
from quire.memory import check
from quire.sequences.sequence import Sequence
from tests.conformance.checkpoints import EOS_TOKEN_ID, generate_with_transformers, ragged_prompts
from tests.conformance.conftest import Reference
from tests.conformance.test_mtp import RecordingDrafter, assert_those_of
from tests.models.mtp import SlowHead, save_mtp_checkpoint
from tests.ops.triton.device import MARKS
from tests.ops.triton.test_captured_drafts import GREEDY, NUM_TOKENS, SIZES, runner_of
from tests.ops.triton.test_engine import load

pytestmark = MARKS

Drafts = Callable[[tuple[int, ...], int], tuple[int, ...]]
SCARCE = {"num_kv_blocks": 60, "block_size": 4, "max_model_len": 96, "watermark": 0.0}
# Drafts in a step by the length of a prompt: the first row leaves the passes first, the second one last.
NUM_DRAFTS = {5: 1, 43: 4, 33: 2, 60: 3}


class UnevenDrafter(RecordingDrafter):
    """Wants another number of drafts for each sequence."""

    def propose(self, sequence: Sequence, limit: int) -> tuple[int, ...]:
        return super().propose(sequence, min(limit, NUM_DRAFTS[sequence.num_prompt]))


class SeenPasses:
    """Runs each captured pass of an engine again as it is launched, and compares what it gives and what it stores.

    Attributes:
        replayed, launched: numbers of rows of the passes.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        draft = runner_of(llm).draft
        assert isinstance(draft, MTPDrafter)
        assert isinstance(draft._ladder, GraphLadder)
        self.replayed, self.launched = list[int](), list[int]()
        self._draft, self._ladder, self._run, self._run_pass = draft, draft._ladder, draft._run, draft._ladder.run_pass
        monkeypatch.setattr(draft, "_run", self._see)
        monkeypatch.setattr(draft._ladder, "run_pass", self._see_captured)

    def _see(self, items: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        num_replayed = len(self.replayed)
        results = self._run(items, hidden)
        if len(self.replayed) == num_replayed:
            self.launched.append(len(items))
        return results

    def _see_captured(self, items: Any, builder: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        self.replayed.append(len(items))
        (kv,) = self._draft._storages
        assert isinstance(kv, KVStorage)
        hidden_before, kv_before = hidden.clone(), kv.data.clone()
        found, token_ids = self._run_pass(items, builder, hidden)
        stored = kv.data[1:].clone()
        kv.data.copy_(kv_before)
        self._draft._ladder = None
        expected, likeliest = self._run(items, hidden_before)
        self._draft._ladder = self._ladder
        torch.testing.assert_close(found, expected)
        assert token_ids.tolist() == likeliest.tolist()
        torch.testing.assert_close(stored, kv.data[1:], equal_nan=True)
        return found, token_ids


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a model whose head often guesses right, and often wrong."""
    folder = save_mtp_checkpoint(tmp_path_factory.mktemp("noisy"), noise=0.07, head_noise=0.5)
    prompts = ragged_prompts()[1:5]
    return Reference(folder, prompts, generate_with_transformers(folder, prompts, [EOS_TOKEN_ID]), 4)


@pytest.fixture(scope="module")
def drafts(noisy: Reference) -> Drafts:
    """Return the slow twin of its head."""
    return cache(SlowHead(noisy.folder).drafts)


def load_head(reference: Reference, **options: Any) -> tuple[LLM, UnevenDrafter]:
    """Load a model with drafts of its head, for four sequences at most."""
    llm = load(str(reference.folder), speculative_method="mtp", **(SIZES | {"num_kv_blocks": 240} | options))
    drafter = llm.engine.scheduler.drafts.drafter = UnevenDrafter()
    return llm, drafter


def assert_greedy(llm: LLM, reference: Reference) -> None:
    outputs = llm.generate(reference.prompts, GREEDY, use_tqdm=False)
    for output, expected in zip(outputs, reference.outputs, strict=True):
        assert list(output.outputs[0].token_ids[: len(expected)]) == list(expected[:NUM_TOKENS])
    check(llm.engine.scheduler.memory)


def test_passes_are_captured(noisy: Reference, drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences leave the passes one after the other, from a prompt on and behind a prefix hit."""
    llm, drafter = load_head(noisy)
    passes = SeenPasses(llm, monkeypatch)
    for _ in range(2):
        assert_greedy(llm, noisy)
    assert_those_of(drafts, drafter)
    assert llm.stats.prefix_hits > 0
    assert not passes.launched
    assert {1, 2, 3, 4} == set(passes.replayed)


def test_more_sequences_than_a_captured_pass_has(
    noisy: Reference, drafts: Drafts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their passes are launched until some of them have their drafts."""
    llm, drafter = load_head(noisy, cudagraph_capture_sizes=(2,))
    passes = SeenPasses(llm, monkeypatch)
    assert_greedy(llm, noisy)
    assert_those_of(drafts, drafter)
    assert {1, 2} == set(passes.replayed)
    assert {3, 4} == set(passes.launched)


def test_preempted_sequences(noisy: Reference, drafts: Drafts, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come back to other blocks."""
    llm, drafter = load_head(noisy, **SCARCE)
    passes = SeenPasses(llm, monkeypatch)
    assert_greedy(llm, noisy)
    assert_those_of(drafts, drafter)
    assert llm.stats.num_preemptions > 0
    assert passes.replayed
    assert not passes.launched
