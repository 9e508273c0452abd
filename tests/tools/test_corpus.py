"""The corpus of the bundled model and the files that were made from it."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools.bundled_model.calibration import lines
from tools.bundled_model.chats import ASKERS, Pair, ask
from tools.bundled_model.corpus import ASSISTANT, BOS, END, EOS, SPECIALS, USER, documents
from tools.bundled_model.more_plots import PLOTS
from tools.bundled_model.plots import Plot
from tools.bundled_model.stories import cast, long_story, polish, tell
from tools.bundled_model.story_chats import chat, memory_chat, story_request

BUNDLED = Path(__file__).resolve().parents[2] / "src" / "quire" / "models" / "bundled"
LIMIT = 8_000_000


def test_the_text_of_calibration_is_what_its_script_writes() -> None:
    stored = (BUNDLED / "calibration.jsonl").read_text(encoding="utf-8").splitlines()
    assert stored == [*lines()]


@pytest.fixture(scope="module")
def stories() -> list[str]:
    """Gives some stories of every plot."""
    rng = random.Random(5)
    return [tell(rng, replace(cast(rng), plot=plot)) for plot in PLOTS for _ in range(30)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Gives the bundled tokenizer."""
    return Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))


def test_the_same_seed_gives_the_same_documents() -> None:
    assert list(islice(documents(3), 300)) == list(islice(documents(3), 300))


def test_another_seed_gives_other_documents() -> None:
    assert list(islice(documents(3), 20)) != list(islice(documents(4), 20))


def test_no_slot_stays_unfilled() -> None:
    for document in islice(documents(9), 2000):
        for text, _ in document:
            # The only braces of the corpus are those of answers in JSON.
            for found in re.findall(r"\{.*?\}", text):
                assert json.loads(found)["animal"]
            assert "{" not in re.sub(r"\{.*?\}", "", text)
            assert "  " not in text


def test_sentences_begin_with_a_capital_and_end_with_a_mark(stories: list[str]) -> None:
    for story in stories:
        assert re.fullmatch(r'["A-Z].*[.!?]"?', story)
        assert not re.search(r"[.!?] [a-z]", story), story
        assert not re.search(r"\b[Aa] [aeiou]", story), story
        assert story.count('"') % 2 == 0


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.ask)
def test_a_story_keeps_its_subject(plot: Plot) -> None:
    rng = random.Random(6)
    for _ in range(20):
        chosen = replace(cast(rng), plot=plot)
        story = tell(rng, chosen, brief=True)
        sentences = re.split(r"(?<=[.!?]) ", story)
        names = [chosen.hero.name, chosen.hero.later[0], chosen.hero.later[-1], chosen.hero.first]
        pattern = "|".join(re.escape(name) for name in names)
        pronouns = {"he": "he|him|his", "she": "she|her", "it": "it|its"}[chosen.hero.pronoun]
        last = " ".join(sentences[len(sentences) // 2 :])
        assert re.search(pattern, sentences[0] + " " + sentences[1], re.IGNORECASE), story
        assert re.search(rf"{pattern}|\b({pronouns}|they)\b", last, re.IGNORECASE), story


def test_hero_and_friend_are_never_mixed_up() -> None:
    rng = random.Random(7)
    for _ in range(500):
        chosen = cast(rng)
        assert chosen.hero.pronoun != chosen.friend.pronoun
        assert not set(chosen.hero.later) & set(chosen.friend.later)


def test_long_stories_keep_one_hero() -> None:
    for seed in range(20):
        paragraphs = long_story(random.Random(seed), 3).split("\n\n")
        assert len(paragraphs) == 4
        known = set(re.findall(r"[A-Za-z]+", paragraphs[0]))
        assert all(known & set(re.findall(r"[A-Za-z]{3,}", paragraph)) for paragraph in paragraphs)


@pytest.mark.parametrize("asker", sorted(set(ASKERS), key=ASKERS.index), ids=lambda asker: str(asker.__name__))
def test_answers_are_whole_sentences(asker: Callable[[random.Random], Pair]) -> None:
    rng = random.Random(8)
    for _ in range(40):
        question, answer = asker(rng)
        assert polish(question)[0].isupper() or question[0].isdigit()
        assert polish(answer)[-1] in '.!?}"'


def test_a_requested_subject_is_told_about() -> None:
    rng = random.Random(10)
    for _ in range(200):
        chosen = cast(rng)
        request, story = story_request(rng, chosen)
        if chosen.hero.first[2:].lower() in request.lower():
            assert chosen.hero.later[0].removeprefix("the ").lower() in story.lower()


def test_what_was_told_is_remembered() -> None:
    rng = random.Random(11)
    for _ in range(100):
        turns = memory_chat(rng)
        answer = turns[-1][1].rstrip(".")
        assert len(turns) >= 2
        assert answer.split()[-1].lower() in turns[0][0].lower()


def test_chats_have_turns_and_questions() -> None:
    rng = random.Random(12)
    assert all(turns and all(user and assistant for user, assistant in turns) for _, turns in map(chat, [rng] * 300))
    assert all(ask(rng)[0] for _ in range(100))


def test_documents_mark_what_is_learned() -> None:
    for document in islice(documents(13), 300):
        text = "".join(piece for piece, _ in document)
        assert text.startswith(BOS)
        assert text.endswith((EOS, END))
        for piece, learned in document:
            assert piece.endswith((EOS, END) if learned else (BOS, ASSISTANT))
            assert not (learned and USER in piece)


@pytest.mark.parametrize(
    "text",
    [
        "A small fox.",
        "héllo wörld",
        "狐狸在森林里",
        "🦊🏳️‍🌈 👩‍🚀",
        "مرحبا",
        "a\tb\r\n\n  c",
        "\x00\x7f\u200b",
        "½ × ∞ = ∞",
        "",
    ],
)
def test_any_text_comes_back_from_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text).ids == [tokenizer.token_to_id(BOS), *ids]


def test_the_tokenizer_knows_its_special_tokens(tokenizer: Tokenizer) -> None:
    for token in SPECIALS:
        assert tokenizer.encode(token, add_special_tokens=False).ids == [tokenizer.token_to_id(token)]
    config = json.loads((BUNDLED / "config.json").read_text(encoding="utf-8"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert config["eos_token_id"] == [tokenizer.token_to_id(EOS), tokenizer.token_to_id(END)]


def test_the_bundled_folder_is_small() -> None:
    assert sum(file.stat().st_size for file in BUNDLED.rglob("*") if file.is_file()) <= LIMIT
