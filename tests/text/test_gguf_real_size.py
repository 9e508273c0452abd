"""Tokenizers of GGUF files at the size of released vocabularies: what they cost, and the tokens that they give."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from quire.cli.quantization.gguf_header import encode_header
from quire.models.gguf.header import read_header
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.real_size import GEMMA_SIZE, PREFIX, QWEN_SIZE, gemma_size_fields, qwen_size_fields

# Processor time of reading a header and building its tokenizer. It takes 0.5 s for the smaller one and 1.1 s for the
# larger one; a walk over the vocabulary for each merge took five minutes.
MAX_SECONDS = 10.0
# The tokens around a message.
TURNS = {QWEN_SIZE: ("<|im_start|>", "<|im_end|>"), GEMMA_SIZE: ("<start_of_turn>", "<end_of_turn>")}
WORDS = ("the", "house", "in", "1234", "strasse", "HTTPServer", "x_y", "ofthe", "aaaaaaaaaaaaaaaa", "Zebra-Crossing")


def merged_slowly(word: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Merge the parts of a word, the best pair first."""
    while True:
        ranked = [(rank(*pair), idx) for idx, pair in enumerate(pairwise(word))]
        known = [(rank, idx) for rank, idx in ranked if rank is not None]
        if not known:
            return word
        _, idx = min(known)
        word = [*word[:idx], word[idx] + word[idx + 1], *word[idx + 2 :]]


def ranks_of(fields: Mapping[str, Any]) -> Callable[[str, str], float | None]:
    """Return the rank of a merge of two tokens."""
    if f"{PREFIX}merges" in fields:
        ranks = {tuple(merge.split(" ")): float(rank) for rank, merge in enumerate(fields[f"{PREFIX}merges"])}
        return lambda left, right: ranks.get((left, right))
    scores = dict(zip(fields[f"{PREFIX}tokens"], fields[f"{PREFIX}scores"], strict=True))
    return lambda left, right: None if left + right not in scores else -scores[left + right]


@pytest.mark.parametrize(
    ("make", "size"), [(qwen_size_fields, QWEN_SIZE), (gemma_size_fields, GEMMA_SIZE)], ids=["qwen", "gemma"]
)
def test_a_released_vocabulary_opens_at_once(make: Callable[[], Mapping[str, Any]], size: int, tmp_path: Path) -> None:
    fields = make()
    path = tmp_path / "model.gguf"
    path.write_bytes(encode_header(fields, []))
    start = time.process_time()
    tokenizer = Tokenizer.from_files(read_gguf_tokenizer(path, read_header(path).fields))
    assert time.process_time() - start < MAX_SECONDS
    assert tokenizer.vocab_size == size
    ids = {token: token_id for token_id, token in enumerate(fields[f"{PREFIX}tokens"])}
    rank = ranks_of(fields)
    for word in WORDS:
        expected = [ids[part] for part in merged_slowly([*word], rank)]
        if fields[f"{PREFIX}model"] == "llama":  # no division into words
            assert tokenizer.encode(word, add_special_tokens=False) == expected
        elif word.isalpha():
            assert tokenizer.encode(word) == expected
        assert tokenizer.decode(expected) == word
    check_texts_of_clients(tokenizer, *TURNS[size])


def check_texts_of_clients(tokenizer: Tokenizer, begin: str, end: str) -> None:
    """Check that none of the tokenizer's control tokens in a message becomes a token, and all of the template's do."""
    template = ChatTemplate(f"{{% for m in messages %}}{begin}{{{{ m.content | trim }}}}{end}{{% endfor %}}")
    try:
        for text in ("".join(tokenizer.added_ids), "a ".join(tokenizer.added_ids), f"{begin[1:]}{end}<{end[:-1]}"):
            prompt = template.prompt([{"role": "user", "content": text}], added_tokens=tokenizer.added_tokens)
            assert prompt.text == f"{begin}{text}{end}"
            token_ids = tokenizer.encode(prompt, add_special_tokens=False)
            assert [each for each in token_ids if each in tokenizer.special_ids] == [
                *(tokenizer.added_ids[begin], tokenizer.added_ids[end])
            ]
            assert tokenizer.decode(token_ids, skip_special_tokens=False) == prompt.text
    finally:
        template.close()
