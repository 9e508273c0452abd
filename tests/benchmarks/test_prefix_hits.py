"""The benchmark of shared prefixes: what each kind of cache finds with default options."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.prefix_hits import FAMILIES, NUM_REQUESTS, load, measure, prompts

ATTENTION = ("gemma3", "llama3")


def test_prompts_part_right_behind_their_prefix() -> None:
    requests = prompts(100, seed=1)
    assert len({tuple(prompt[:100]) for prompt in requests}) == 1
    assert len({prompt[100] for prompt in requests}) == NUM_REQUESTS


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name in ("gemma3", "lfm2") else pytest.mark.slow) for name in FAMILIES]
)
def test_what_is_found_of_a_prefix(family: str, tmp_path: Path) -> None:
    """Of tokens, all; of states, what the last snapshot before the prefix's end has, and from the third on its end."""
    with load(family, tmp_path) as llm:
        found = measure(llm, 600, at_once=False)
        later = [600] * (NUM_REQUESTS - 1) if family in ATTENTION else [512] + [592] * (NUM_REQUESTS - 2)
        assert found.by_request == [0, *later]
        assert found.share(600) == sum(later) / (600 * (NUM_REQUESTS - 1))
        assert measure(llm, 600, at_once=True).by_request[0] == 0
