"""Lists of prompts: a priority for each, and errors that name one of them; errors of other arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, PoolingParams
from quire.engine.inputs.prompts import Prompt
from quire.engine.inputs.request_options import RequestOptions
from quire.errors import InvalidParameter, PromptTooLong, RequestError, UnsupportedFeature
from tests.engine.test_llm import STORIES, greedy, load

LONG = "fox " * 2000  # more tokens than the context has
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Return an engine for tests that leave nothing behind."""
    with load() as llm:
        yield llm


def test_prompts_of_a_list_may_have_priorities(llm: LLM) -> None:
    with load(scheduling_policy="priority", max_num_seqs=1) as one:
        for priority, expected in (([2, 0, 1], ["1", "2", "0"]), (7, ["0", "1", "2"]), (None, ["0", "1", "2"])):
            ends: list[str] = []
            for output in one._run(STORIES[:3], greedy(2, ignore_eos=True), RequestOptions(), priority=priority):
                ends += [output.request_id] * output.finished
            assert ends == expected
            assert len(one.generate(STORIES[:3], greedy(1), use_tqdm=False, priority=priority)) == 3
        for wrong in ([1, 2], [], "123", [1, 2, None], 1.5):
            with pytest.raises(InvalidParameter, match="priority must be an integer") as caught:
                one.generate(STORIES[:3], greedy(1), use_tqdm=False, priority=wrong)  # type: ignore[arg-type]
            assert caught.value.field == "priority"
            assert not one.engine.has_unfinished
    assert llm.generate(STORIES[0], greedy(1), use_tqdm=False, priority=0)[0].finished
    with pytest.raises(
        InvalidParameter, match="priority must be 0 under the scheduling policy 'fcfs', got 1"
    ) as caught:
        llm.generate(STORIES[:3], greedy(1), use_tqdm=False, priority=[0, 1, 0])
    assert caught.value.field == "priority"
    assert not llm.engine.has_unfinished
    with pytest.raises(InvalidParameter, match="priority must be 0"):  # before any prompt is read
        llm.generate([[-1], [1]], greedy(1), use_tqdm=False, priority=[0, 1])


@pytest.mark.parametrize(
    ("wrong", "field", "words"),
    [
        (LONG, "prompts[1]", "prompts[1]: the prompt has "),
        ([], "prompts[1]", "prompts[1] must be at least one token long"),
        ({"prompt_token_ids": [-1]}, "prompts[1]", "prompts[1] must be token ids from 0 to "),
    ],
)
def test_a_refused_prompt_of_a_list_is_named_and_none_runs(llm: LLM, wrong: Prompt, field: str, words: str) -> None:
    before = llm.stats.num_steps
    for run in (llm.generate, llm.embed):
        with pytest.raises(RequestError) as caught:
            run(["a", wrong], use_tqdm=False)  # type: ignore[operator]
        assert (caught.value.field, str(caught.value)[: len(words)]) == (field, words)
        with pytest.raises(RequestError) as caught:
            run([wrong], use_tqdm=False)  # type: ignore[operator]
        assert "prompts[" not in str(caught.value)
    assert llm.stats.num_steps == before


@pytest.mark.parametrize(
    ("queries", "documents", "field"),
    [
        ("a", ["b", LONG], "documents[1]"),
        ("a", LONG, "documents"),
        (LONG, ["b", "c"], "queries"),
        (["a", LONG], ["b", "c"], "queries[1]"),
    ],
)
def test_a_refused_text_of_a_score_has_the_name_of_its_argument(
    llm: LLM, queries: str | list[str], documents: str | list[str], field: str
) -> None:
    with pytest.raises(PromptTooLong) as caught:
        llm.score(queries, documents, use_tqdm=False)
    assert (caught.value.field, str(caught.value).partition(" has ")[0]) == (field, f"{field}: the prompt")


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        ([USER, [{"role": "king", "content": "a"}]], "messages[1][0].role", "messages[1][0].role must be one of "),
        ([USER, []], "messages[1]", "messages[1] must be from 1 to "),
        ([USER, [{"role": "user", "content": LONG}]], "messages[1]", "messages[1]: the prompt has "),
        ([{"role": "user", "content": LONG}], "messages", "the prompt has "),
        ([{"role": "user", "content": "\ud800"}], "messages", "messages must be Unicode text "),
        ([{"role": "king", "content": "a"}], "messages[0].role", "messages[0].role must be one of "),
    ],
)
def test_a_refused_conversation_is_named(llm: LLM, messages: list[Any], field: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, use_tqdm=False)
    assert (caught.value.field, str(caught.value)[: len(words)]) == (field, words)


@pytest.mark.parametrize("wrong", ["hi", {"role": "user", "content": "hi"}, 3, None])
def test_what_is_no_list_of_messages_is_shown(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidParameter, match="messages must be a list of messages, got ") as caught:
        llm.chat(wrong)
    assert str(caught.value).endswith(f"got {wrong!r}")


def test_a_number_of_tokens_to_keep_may_be_minus_one() -> None:
    assert PoolingParams(truncate_prompt_tokens=-1).truncate_prompt_tokens == -1
    for wrong in (0, -2, 1.0, True, 2**31):
        with pytest.raises(InvalidParameter, match="truncate_prompt_tokens must be -1, or an integer from 1 to "):
            PoolingParams(truncate_prompt_tokens=wrong)  # type: ignore[arg-type]


def test_a_refusal_to_unpin_names_the_call(llm: LLM) -> None:
    with pytest.raises(UnsupportedFeature) as caught:
        llm.unpin_prefix("a")
    assert caught.value.field == "unpin_prefix"
