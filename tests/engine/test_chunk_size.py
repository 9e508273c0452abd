"""The chunk size that keeps a limit of inter-token latency, on a machine whose costs are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quire.engine.control.chunk_size import INITIAL_CHUNK_TOKENS, MIN_CHUNK_TOKENS, ChunkSizeController
from quire.scheduling import StepPlan
from tests.scheduling.harness import Harness, Job, Setting

LIMIT_S = 0.05


def cost(num_decoding: int, num_chunk_tokens: int) -> float:
    """Weights are read once; each stream costs its cache, each token of a prompt arithmetic."""
    return 0.010 + 0.0005 * num_decoding + max(0.0, num_chunk_tokens - 8) * 0.00025


def counts_of(plan: StepPlan) -> tuple[int, int]:
    lengths = [len(item.token_ids) for item in plan.items]
    num_decoding = lengths.count(1)
    return num_decoding, sum(lengths) - num_decoding


def longest_steps(
    controller: ChunkSizeController | None, cost_of: Callable[[int, int], float], num_streams: int
) -> tuple[float, int]:
    """Serve long prompts one after the other beside streams.

    Returns:
        The longest step in which streams decoded, in seconds, and how many steps there were.
    """
    harness = Harness(Setting(budget=2048, max_num_seqs=64, block_size=16, num_blocks=4000), is_audited=False)
    for seed in range(num_streams):
        harness.add(Job(prompt=(seed % 11,) * 4, max_tokens=4000, ignore_eos=True), seed=seed)
    harness.step()
    prompts = [harness.add(Job(prompt=(idx % 11, 5) * 1500, max_tokens=1), seed=100 + idx) for idx in range(4)]
    longest, num_steps = 0.0, 0
    while not all(request.is_finished for request in prompts):
        if controller is not None:
            harness.scheduler.chunk_tokens = controller.chunk_tokens
        counts = counts_of(harness.step())
        num_steps += 1
        assert counts[0] >= num_streams, "no stream waits for a step"
        longest = max(longest, cost_of(*counts))
        if controller is not None:
            controller.record_step(*counts, cost_of(*counts))
    return longest, num_steps


def test_a_step_takes_what_is_allowed_and_makes_use_of_it() -> None:
    free, _ = longest_steps(None, cost, 8)
    assert free > 5 * LIMIT_S, "else there is nothing to keep"
    paced, num_steps = longest_steps(ChunkSizeController(LIMIT_S), cost, 8)
    assert paced <= 1.05 * LIMIT_S
    # 144 tokens fit a step at this cost; 12,000 take 84 such steps, and a few more until that is known.
    assert num_steps <= 100


def test_a_limit_that_cannot_be_kept_leaves_prompts_the_least() -> None:
    controller = ChunkSizeController(0.001)
    _, num_steps = longest_steps(controller, cost, 8)
    assert controller.chunk_tokens == MIN_CHUNK_TOKENS
    assert num_steps <= INITIAL_CHUNK_TOKENS + 12_000 // MIN_CHUNK_TOKENS


def test_a_machine_that_slows_down_is_followed() -> None:
    controller = ChunkSizeController(LIMIT_S)
    longest_steps(controller, cost, 8)
    before = controller.chunk_tokens
    longest_steps(controller, lambda *counts: 2 * cost(*counts), 8)
    assert MIN_CHUNK_TOKENS < controller.chunk_tokens < 0.6 * before
    longest_steps(controller, cost, 8)
    assert controller.chunk_tokens == pytest.approx(before, rel=0.1)


def test_prompts_alone_say_what_a_token_costs() -> None:
    controller = ChunkSizeController(LIMIT_S)
    controller.record_step(0, 512, 0.512)
    assert controller.chunk_tokens == 50
    controller.record_step(3, 0, 0.010)
    assert controller.chunk_tokens == 40


@pytest.mark.parametrize(("reserve_s", "expected"), [(0.0, 80), (0.01, 40), (0.05, 30), (0.2, 16)])
def test_chunks_leave_time_for_other_work(reserve_s: float, expected: int) -> None:
    control = ChunkSizeController(0.1)
    control.reserve_s = reserve_s
    control.record_step(4, 0, 0.02)
    control.record_step(4, 64, 0.02 + 64 * 0.001)
    assert control.chunk_tokens == expected
