"""Measured step times reach the preemption costs, the chunk size and the number of drafts."""

from __future__ import annotations

import pytest

from quire.engine.control.chunk_size import INITIAL_CHUNK_TOKENS
from quire.engine.control.step_recorder import StepRecorder
from quire.scheduling import ScheduledSequence, TransferRates
from quire.sequences.decoding.lookup import PromptLookup
from quire.sequences.decoding.speculation import AdaptiveDrafter
from tests.scheduling.harness import Harness, Setting


def items(*counts: int, num_draft: int = 0) -> list[ScheduledSequence]:
    """Return a scheduled sequence for each count of tokens, with drafts behind them."""
    return [
        ScheduledSequence(idx, 0, range(count + num_draft), (), 1, None, num_draft) for idx, count in enumerate(counts)
    ]


def harness() -> Harness:
    return Harness(Setting(budget=64, max_num_seqs=4))


def test_rates_come_from_steps_with_many_tokens() -> None:
    preemption = (scheduler := harness().scheduler).preemption
    recorder = StepRecorder(scheduler, 5e9, None, None)
    assert preemption.rates == TransferRates(copy_bytes_per_s=5e9)
    assert recorder.tokens_per_s is None
    recorder.record_step(items(1, 1, 1, 1, 1, 1, 1, 1, 2), 1.0)
    recorder.record_step(items(100), 0.0)
    assert preemption.rates == TransferRates(copy_bytes_per_s=5e9), "decodes, and clocks that stand still, say nothing"
    recorder.record_step(items(1, num_draft=500), 0.25)
    assert recorder.tokens_per_s is None, "drafts are no tokens of a prompt"
    recorder.record_step(items(500), 0.25)
    assert recorder.tokens_per_s == preemption.rates.prefill_tokens_per_s == 2000.0
    for _ in range(500):
        recorder.record_step(items(*[100] * 10), 1.0)
    assert preemption.rates.prefill_tokens_per_s == pytest.approx(1000.0, rel=1e-3)
    assert preemption.rates.copy_bytes_per_s == 5e9


def test_without_host_tier_and_limit_only_the_prefill_rate_is_measured() -> None:
    scheduler = harness().scheduler
    recorder = StepRecorder(scheduler, None, None, None)
    assert recorder.record_step(items(8, 1), 0.01) == 9
    assert scheduler.chunk_tokens is None
    assert scheduler.preemption.rates == TransferRates(prefill_tokens_per_s=900.0)


def test_chunks_follow_the_limit_from_the_start() -> None:
    scheduler = harness().scheduler
    recorder = StepRecorder(scheduler, None, 50.0, None)
    assert scheduler.chunk_tokens == INITIAL_CHUNK_TOKENS
    recorder.record_step(items(1, 1), 0.010)
    recorder.record_step(items(1, 80, 1), 0.090)
    assert scheduler.chunk_tokens == 40, "40 ms are left, at 1 ms a token"


def test_only_decodes_say_what_drafts_cost() -> None:
    speculation = AdaptiveDrafter(PromptLookup(2, 8), 4)
    recorder = StepRecorder(harness().scheduler, None, None, speculation)
    before = speculation.step_costs
    assert recorder.record_step(items(1, 30, num_draft=2), 0.5) == 35
    assert (speculation.step_costs, speculation.is_measuring) == (before, False)
    assert recorder.record_step(items(1, 1, num_draft=2), 0.014) == 6
    assert speculation.is_measuring, "nothing is known of two sequences without drafts"
    recorder.record_step(items(1, 1), 0.010)
    assert not speculation.is_measuring
    recorder.record_step(items(1, 1, num_draft=2), 0.014)
    assert speculation.step_costs == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8])
