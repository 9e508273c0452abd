"""The benchmark of drafts measures what it says."""

from __future__ import annotations

import random

import pytest

from benchmarks.speculative import CASES, FIRST_ID, VOCAB_SIZE, Task, edited, serve, task, words_of
from quire import LLM


@pytest.mark.parametrize("case", CASES)
def test_a_case_is_the_same_every_time_and_fits_the_vocabulary(case: str) -> None:
    first, again, other = task(case, 200, 60, 1), task(case, 200, 60, 1), task(case, 200, 60, 2)
    assert first == again != other
    assert len(first.prompt) == 200
    assert first.text is None or len(first.text) == 60
    assert all(FIRST_ID <= token < VOCAB_SIZE for token in (*first.prompt, *(first.text or ())))


def test_an_edit_leaves_most_as_it_was() -> None:
    words = words_of("architecture.md")[:500]
    new = edited(words, random.Random(0))
    assert 400 < len(new) < 600
    assert sum(word in set(words) for word in new) > 0.9 * len(new)


def test_the_text_is_dictated_and_counted_with_drafts_as_without() -> None:
    prompt = list(range(300, 360))
    tasks = [Task(prompt, prompt[:40]), Task(prompt[5:], prompt[10:50])]
    for method in ("off", "ngram"):
        llm = LLM("bundled", speculative_method=method, num_threads=1, num_kv_blocks=100, max_num_seqs=2)
        figures = serve(llm, tasks, 40)
        # The first token of the last to start is not timed.
        assert 76 <= figures["tokens"] <= 79
        assert (figures["accepted"] > 0) == (method == "ngram")
        assert figures["steps"] <= 39
        assert figures["seconds"] > 0
