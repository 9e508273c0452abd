"""Token ids of files are those of the library that reads their twins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from quire.config import EngineConfig
from quire.engine.startup.tokenizers import open_tokenizer
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.text.documents import bundled_text, read_text
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.real.models import files_with_twins, twin_of

TEXTS = [
    "",
    " ",
    "   leading and  double  spaces   ",
    "\n\n\tTabs,\r\nand lines\n",
    "don't can't I'll we've O'Neill",
    "1234567890 3.14159 1,000,000 0x1F 12:34",
    "naïve café Straße Ærø ǅ ﬁ",
    "日本語のテキスト、中文，한국어 텍스트",
    "العربية עברית हिन्दी ไทย",
    "🙂👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u200b\u00a0\u3000",
    "<start_of_turn>user\nHi<end_of_turn>\n<bos><eos><unk><pad>",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}\n",
    "https://example.com/a?b=c&d=%20#e",
    "\x00\x01\x7f\ufffd",
    "a" * 300,
]


@pytest.fixture(scope="module", params=files_with_twins(), ids=lambda file: file.stem)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Tokenizer, Any]]:
    file: Path = request.param
    tokenizer = open_tokenizer(EngineConfig.from_options(model=str(file)).model, Checkpoint.open(str(file)))
    assert tokenizer is not None
    yield tokenizer, AutoTokenizer.from_pretrained(twin_of(file))
    tokenizer.close()


@pytest.mark.parametrize("text", [*TEXTS, *read_text(bundled_text("quality.jsonl"), "text").splitlines()])
def test_ids_are_those_of_the_library(pair: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, library = pair
    found = tokenizer.encode(text)
    assert found == library(text).input_ids
    assert tokenizer.decode(found) == library.decode(found, skip_special_tokens=True)
