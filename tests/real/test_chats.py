"""Chats with a file: turns end, templates are rendered, and neither caches nor drafts change an answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from transformers import AutoTokenizer

from quire import LLM, RequestOutput, SamplingParams
from tests.real.models import files, files_with_twins, twin_of

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>"
    "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
END = "<end_of_turn>"
QUESTIONS = ["Name three birds of the sea.", "Which of them is the largest?", "Where does it live in winter?"]
# Repetition that drafts from the prompt find.
LIST = "Monday: bread, milk\nTuesday: bread, milk\nWednesday: bread, milk\nThursday:"
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5)


class Served(NamedTuple):
    """A model that is served in float32.

    Args:
        llm: the engine.
        path: file or folder.
        tie: difference of log probabilities below which either of two tokens may be the greedy one. Sums in another
            order move values over the edges of roundings to int8, where activations are rounded, and each moves
            logits by as much as rounding does.
    """

    llm: LLM
    path: Path
    tie: float


def open_llm(path: Path, folder: Path, **options: Any) -> LLM:
    template = folder / "template.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    options = {"num_kv_blocks": 256, "max_num_seqs": 8, "dtype": "float32", **options}
    return LLM(str(path), chat_template=str(template), **options)


@pytest.fixture(
    scope="module",
    params=[*((file, 0.3) for file in files()), *((twin_of(file), 1e-3) for file in files_with_twins())],
    ids=lambda param: param[0].name,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path, tie = request.param
    with open_llm(path, tmp_path_factory.mktemp("real")) as llm:
        if len(llm.get_tokenizer().encode(END, add_special_tokens=False)) != 1:
            pytest.skip(f"the vocabulary has no {END}")
        yield Served(llm, path, tie)


def check_same(found: RequestOutput, expected: RequestOutput, tie: float) -> None:
    """Check that greedy tokens are the same up to where two of them are as likely, if they part at all."""
    ours, theirs = found.outputs[0], expected.outputs[0]
    pairs = enumerate(zip(ours.token_ids, theirs.token_ids, strict=True))
    parting = next((idx for idx, (one, other) in pairs if one != other), None)
    if parting is not None:
        assert theirs.logprobs is not None
        likely = theirs.logprobs[parting]
        assert ours.token_ids[parting] in likely, "a token that is not likely"
        assert likely[theirs.token_ids[parting]].logprob - likely[ours.token_ids[parting]].logprob < tie


def conversation(num_answers: int, answers: list[str]) -> list[dict[str, Any]]:
    """Return a chat up to its next question."""
    messages: list[dict[str, Any]] = []
    for question, answer in zip(QUESTIONS, answers[:num_answers], strict=False):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return [*messages, {"role": "user", "content": QUESTIONS[num_answers]}]


def test_a_turn_ends_with_its_token(served: Served) -> None:
    """The file names only the token that ends a text; what a folder lists as ends stays as it is."""
    if served.path.is_dir():
        pytest.skip("generation_config.json lists ends")
    (end,) = served.llm.get_tokenizer().encode(END, add_special_tokens=False)
    params = SamplingParams(temperature=0.0, max_tokens=6, logit_bias={end: 100.0})
    (output,) = served.llm.chat(conversation(0, []), params, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].text) == ("stop", "")


def test_templates_are_rendered_as_by_the_library(served: Served) -> None:
    twin = served.path if served.path.is_dir() else twin_of(served.path)
    if not twin.is_dir():
        pytest.skip("no twin")
    library: Any = AutoTokenizer.from_pretrained(twin)
    messages = conversation(2, ["Gulls,\n  terns and auks. ", "The albatross: 3.5 m 🙂"])
    expected = library.apply_chat_template(
        messages, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False
    )
    assert served.llm.render_chat(messages) == list(expected)


def test_later_turns_hit_the_prefix_cache_and_answer_as_cold_ones(served: Served) -> None:
    llm = served.llm
    answers: list[RequestOutput] = []
    for turn in range(len(QUESTIONS)):
        llm.reset_prefix_cache()
        answers += llm.chat(conversation(turn, [each.outputs[0].text for each in answers]), GREEDY, use_tqdm=False)
        assert answers[-1].num_cached_tokens == 0
    llm.reset_prefix_cache()
    for turn, answer in enumerate(answers):
        (warm,) = llm.chat(conversation(turn, [each.outputs[0].text for each in answers]), GREEDY, use_tqdm=False)
        assert (warm.num_cached_tokens > 16) == (turn > 0)
        check_same(warm, answer, served.tie)


def test_answers_do_not_depend_on_the_batch(served: Served) -> None:
    llm, prompts = served.llm, [LIST, *QUESTIONS]
    llm.reset_prefix_cache()
    together = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate([prompt], GREEDY, use_tqdm=False)
        check_same(output, alone, served.tie)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_change_no_greedy_token(served: Served, method: str, tmp_path: Path) -> None:
    expected = served.llm.generate([LIST, *QUESTIONS], GREEDY, use_tqdm=False)
    with open_llm(served.path, tmp_path, speculative_method=method) as drafting:
        found = drafting.generate([LIST, *QUESTIONS], replace(GREEDY, logprobs=None), use_tqdm=False)
        assert drafting.stats.num_accepted_tokens > 0
    for output, other in zip(found, expected, strict=True):
        check_same(output, other, served.tie)
