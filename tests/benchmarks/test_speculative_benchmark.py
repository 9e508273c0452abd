"""The benchmark of drafts measures what it says."""

from __future__ import annotations

import random

import pytest

from benchmarks import agents
from benchmarks.speculative import (
    CASES,
    FIRST_ID,
    SOURCES,
    STORIES,
    TRACE_LEN,
    TRACES,
    VOCAB_SIZE,
    Task,
    edited,
    requests,
    serve,
    serve_in_turn,
    task,
    words_of,
)
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


@pytest.mark.parametrize("case", [*TRACES, SOURCES])
def test_a_trace_is_the_same_every_time_and_fits_a_context(case: str) -> None:
    first, again, other = requests(case, 1, 2), requests(case, 1, 2), requests(case, 2, 2)
    assert first == again != other
    assert len(first) == (2 if case == SOURCES else 12)
    assert all(len(prompt) + len(text or ()) <= TRACE_LEN for prompt, text, _ in requests(case, 0, 60))


def test_outputs_of_a_trace_are_in_the_prompts_of_chats_only() -> None:
    fresh, chats = (agents.trace(0, 3, has_history=has_history) for has_history in (False, True))
    assert [turn.output for turn in fresh] == [turn.output for turn in chats]
    for idx, (one, other) in enumerate(zip(fresh, chats, strict=True)):
        earlier = [turn.output for turn in fresh[idx - idx % 6 : idx]]
        assert not any(output in one.prompt for output in earlier)
        assert all(output in other.prompt for output in earlier)


def test_what_earlier_outputs_say_helps_the_method_that_keeps_them() -> None:
    """Stories of the bundled model, said by itself: the second time every output is known."""
    stories = requests(STORIES, 0, 0)[:3]
    accepted: dict[str, int] = {}
    for method in ("ngram", "suffix"):
        llm = LLM("bundled", speculative_method=method, num_threads=1, num_kv_blocks=100, max_num_seqs=2)
        # How fast this machine is does not matter.
        llm.engine.step_recorder.speculation = None
        accepted[method] = serve_in_turn(llm, stories * 2, 1)["accepted"]
    assert accepted["suffix"] > accepted["ngram"] + 100
