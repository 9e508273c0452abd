"""Masks of a step are the same from every thread, and are filled by the thread that was chosen."""

from __future__ import annotations

import threading

import pytest
import torch

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire.execution.sampling.sampler import Sampler
from quire.memory.results import NO_OPS
from quire.scheduling.plan import ScheduledSequence, StepPlan
from quire.structured import mask_filler
from quire.structured.mask_filler import GrammarStates
from tests.structured.grammar_world import NUM_IDS, WANTED, fresh, grammar_cache, new_sequence

NAMES = sorted(set(WANTED) - {"dead"})


def decode(*, uses_thread: bool) -> list[list[int]]:
    """Return the outputs of all grammars together, each token the likeliest of logits that depend on the step."""
    sampler = Sampler(torch.device("cpu"), GrammarStates(grammar_cache(), uses_thread=uses_thread))
    outputs: dict[int, list[int]] = {seq_id: [] for seq_id in range(len(NAMES))}
    openings = [new_sequence(name, temperature=0.0) for name in NAMES]
    items = [ScheduledSequence(seq_id, 0, new.token_ids, (), 1, new) for seq_id, new in enumerate(openings)]
    for step in range(30):
        logits = torch.randn(len(items), NUM_IDS, generator=torch.Generator().manual_seed(step))
        sampler.begin_step(StepPlan(step, tuple(items), NO_OPS, ()))
        results = sampler.sample(logits, items)
        following = []
        for result in results:
            assert result.error is None
            output = outputs[result.seq_id]
            start = 2 + len(output)
            output += result.token_ids
            if 0 not in result.token_ids:
                following.append(ScheduledSequence(result.seq_id, start, result.token_ids, (), 1, None))
        items = following
        if not items:
            break
    return list(outputs.values())


def test_masks_do_not_depend_on_the_filling_thread() -> None:
    beside, before = decode(uses_thread=True), decode(uses_thread=False)
    assert beside == before
    assert all(len(output) > 3 for output in beside)
    for name, output in zip(NAMES, beside, strict=True):
        assert fresh(name, [token_id for token_id in output if token_id]).error is None


@pytest.mark.parametrize("uses_thread", [True, False])
def test_masks_are_filled_where_there_is_a_core_for_them(uses_thread: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    fill = mask_filler._fill

    def watched(*given: object) -> None:
        threads.append(threading.current_thread())
        fill(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(mask_filler, "_fill", watched)
    decode(uses_thread=uses_thread)
    assert threads
    assert {thread is threading.current_thread() for thread in threads} == {not uses_thread}
