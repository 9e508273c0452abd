"""The benchmark of preemption measures what it says."""

from __future__ import annotations

import pytest

from benchmarks.preemption import PreemptionCase, mean, serve


def test_a_run_can_be_repeated_and_swapping_wastes_nothing() -> None:
    recompute, swap = (PreemptionCase(0.01, "last", *way, 1) for way in (("recompute", 0), ("swap", 2048)))
    first, again, swapped = serve(recompute, 40, 0), serve(recompute, 40, 0), serve(swap, 40, 0)
    assert first == again
    assert first.num_preemptions > 0
    assert first.wasted > 0
    assert (first.num_swaps, first.moved_bytes) == (0, 0)
    assert swapped.num_swaps == swapped.num_preemptions > 0
    assert swapped.wasted == pytest.approx(0.0, abs=1e-12)
    assert swapped.moved_bytes > 0
    assert mean([first, swapped]).num_swaps == swapped.num_swaps / 2
