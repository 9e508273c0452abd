"""Ranks stay on the cores that are chosen, and leave those of the program alone when they end.

A file of its own: an engine that is open in `test_ranks.py` keeps the thread of the tests on its cores.
"""

from __future__ import annotations

import os

import pytest

from tests.distributed.in_threads import native_library
from tests.engine.test_ranks import GREEDY, PROMPTS, children, start


@pytest.mark.slow
def test_ranks_keep_to_the_cores_that_are_chosen() -> None:
    native_library()
    cpus = sorted(os.sched_getaffinity(0))[-2:]
    if len(cpus) < 2:
        pytest.skip("one core")
    before = {*children()}
    with start(cpu_bind=f"{cpus[1]}|{cpus[0]}", num_threads=None) as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert os.sched_getaffinity(0) == {cpus[1]}
        (rank,) = {*children()} - before
        assert os.sched_getaffinity(rank) == {cpus[0]}
    assert os.sched_getaffinity(0) >= {*cpus}
    with start(cpu_bind="none") as llm:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        (rank,) = {*children()} - before
        assert os.sched_getaffinity(rank) == os.sched_getaffinity(0) >= {*cpus}
