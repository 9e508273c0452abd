"""Tokenizers with the vocabularies of published models: opening them, and what texts cost that pass through them."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from quire.text.tokenizers.detokenizer import IncrementalDetokenizer
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.lock_holds import longest_hold

FOLDERS = ("byte_level_folder", "byte_fallback_folder")
# Seconds of processor time. `get_vocab` of the library takes 0.1 and 0.2 s, in one piece.
LONGEST_HOLD_S = 0.08


@pytest.fixture(scope="module", params=FOLDERS)
def opened(request: pytest.FixtureRequest) -> tuple[Tokenizer, float]:
    """Return a tokenizer, and the seconds of processor time that opening it took."""
    folder: Path = request.getfixturevalue(request.param)
    start_s = time.process_time()
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer, time.process_time() - start_s


def test_a_tokenizer_opens_in_a_second(opened: tuple[Tokenizer, float]) -> None:
    # 0.3 and 0.7 s where this was written; a walk through the vocabulary for each merge takes minutes.
    tokenizer, seconds = opened
    assert tokenizer.vocab_size > 150_000
    assert seconds < 3.0
    text = "The naïve fox 123\n\n  jumps — 你好 🎉 <|im_start|> привет"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_no_text_makes_other_threads_wait_for_the_whole_vocabulary(opened: tuple[Tokenizer, float]) -> None:
    tokenizer, _ = opened
    rng = random.Random(1)
    words = [tokenizer.token_text(rng.randrange(tokenizer.vocab_size)) for _ in range(5000)]
    text = " ".join(rng.choice(words) for _ in range(20_000))
    token_ids: list[int] = []
    assert len(text) > tokenizer._long_texts.piece_chars
    assert longest_hold(tokenizer.prepare_long_texts) < LONGEST_HOLD_S
    assert longest_hold(lambda: token_ids.extend(tokenizer.encode(text))) < LONGEST_HOLD_S
    assert longest_hold(lambda: tokenizer.decode(token_ids)) < LONGEST_HOLD_S
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False)
    assert longest_hold(lambda: detokenizer.push(token_ids)) < LONGEST_HOLD_S
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_a_step_costs_the_detokenizer_no_more_than_its_tokens(opened: tuple[Tokenizer, float]) -> None:
    tokenizer, _ = opened
    detokenizer = IncrementalDetokenizer(tokenizer, range(1000, 1500), skip_special_tokens=True)
    num_known = len(tokenizer.pieces)
    for token_id in range(2000, 2032):
        detokenizer.push([token_id])
    # No table of the whole vocabulary is made: only the tokens that came by were looked at.
    assert len(tokenizer.pieces) - num_known < 50
