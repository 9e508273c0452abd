"""Tokenizers with the vocabularies of published models: opening them, and what texts cost that pass through them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from quire.text.tokenizer import Tokenizer

FOLDERS = ("byte_level_folder", "byte_fallback_folder")


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
