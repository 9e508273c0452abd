"""Long texts have the tokens that they would have whole, and are given up once they are too long."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from quire.errors import CheckpointError, InvalidParameter
from quire.text.tokenizers.gguf_pre_tokenizers import ROWS
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.vocabulary.bounds import growth, least_tokens
from quire.text.vocabulary.components import model_tokens
from quire.text.vocabulary.cuts import Cuts
from quire.text.vocabulary.long_texts import MAX_NORMALIZED_BYTES, MAX_UNCUT_BYTES, PIECE_CHARS, TooManyTokens
from quire.text.vocabulary.patterns import GPT2, Unsupported, WordEnds
from tests.text.kinds import (
    CL100K,
    CUT,
    DEEPSEEK,
    DEEPSEEK_CODER,
    KANA_AND_HAN,
    LLAMA3,
    O200K,
    QWEN2,
    QWEN35,
    TEKKEN,
    WHOLE,
    hard_text,
    kind,
)


def in_pieces(name: str, piece_chars: int = 24) -> Tokenizer:
    """Return a tokenizer for which everything is long."""
    tokenizer = Tokenizer(kind(name))
    tokenizer._long_texts.piece_chars = piece_chars
    return tokenizer


def whole(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    return tokenizer._library.encode(text, add_special_tokens=special).ids


def check_fuzz(name: str, num_texts: int, seed: int) -> int:
    """Check texts of one kind of tokenizer, and return in how many pieces they were made."""
    tokenizer = in_pieces(name)
    num_pieces = 0
    encode = tokenizer._long_texts._encode

    def counted(text: str) -> list[int]:
        nonlocal num_pieces
        num_pieces += 1
        return encode(text)

    tokenizer._long_texts._encode = counted
    rng = random.Random(f"{name} {seed}")
    for _ in range(num_texts):
        text, special = hard_text(rng, rng.randint(10, 150)), rng.random() < 0.5
        assert tokenizer.encode(text, add_special_tokens=special) == whole(tokenizer, text, special=special), text
    return num_pieces


@pytest.mark.parametrize("name", CUT)
def test_pieces_have_the_tokens_of_the_whole(name: str) -> None:
    assert check_fuzz(name, num_texts=60, seed=1) > 60


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CUT)
def test_pieces_have_the_tokens_of_the_whole_for_long(name: str) -> None:
    assert check_fuzz(name, num_texts=4000, seed=2) > 4000


@pytest.mark.parametrize("name", CUT)
def test_the_fuzz_finds_cuts_at_the_wrong_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cuts, "find", lambda self, text, start, end: start)  # noqa: ARG005
    with pytest.raises((AssertionError, InvalidParameter)):
        check_fuzz(name, num_texts=60, seed=1)


@pytest.mark.parametrize("name", WHOLE)
def test_what_cannot_be_shown_to_be_safe_is_not_cut(name: str) -> None:
    tokenizer = in_pieces(name)
    rng = random.Random(3)
    cuts = Cuts(tokenizer._library, model_tokens(tokenizer._library))
    for _ in range(20):
        text = hard_text(rng, 100)
        assert cuts.find(text, 1, len(text)) is None
        if name != "dropout":
            assert tokenizer.encode(text) == whole(tokenizer, text)


def counting(tokenizer: Tokenizer) -> list[int]:
    """Return a list that will have the lengths of the texts that the library is given."""
    lengths: list[int] = []
    encode = tokenizer._long_texts._encode

    def counted(text: str) -> list[int]:
        lengths.append(len(text))
        return encode(text)

    tokenizer._long_texts._encode = counted
    return lengths


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in ("llama3", "gpt2", "llama2")])
def test_a_text_of_a_million_characters_goes_in_pieces_of_like_size(name: str) -> None:
    tokenizer = Tokenizer(kind(name))
    lengths = counting(tokenizer)
    text = "Some words, 12 numbers; and \n lines. " * 30_000
    assert tokenizer.encode(text) == whole(tokenizer, text)
    assert len(lengths) > 10
    assert max(lengths) < PIECE_CHARS + 100


def test_no_more_is_read_than_shows_that_a_text_is_too_long() -> None:
    tokenizer = Tokenizer(kind("llama3, framed"))
    lengths = counting(tokenizer)
    text = "the fox " * 100_000
    num_tokens = len(tokenizer.encode(text))
    del lengths[:]
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(text, max_tokens=num_tokens // 3)
    assert num_tokens // 3 < caught.value.num_tokens < num_tokens // 2
    assert not caught.value.is_exact
    assert sum(lengths) < len(text) // 2
    assert len(tokenizer.encode(text, max_tokens=num_tokens)) == num_tokens
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(text, max_tokens=num_tokens - 1)
    assert (caught.value.num_tokens, caught.value.is_exact) == (num_tokens, True)
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode("the fox", max_tokens=1)
    assert (caught.value.num_tokens, caught.value.is_exact) == (4, True)
    del lengths[:]
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode("x" * 10**6, max_tokens=1000)
    assert 1000 < caught.value.num_tokens <= len(whole(tokenizer, "x" * 10**6))
    assert not lengths, "the length of the text alone shows it"


@pytest.mark.parametrize("name", ["gpt2", "llama2", "unigram of one word"])
def test_a_part_that_cannot_be_cut_is_not_read_whole(name: str) -> None:
    tokenizer = Tokenizer(kind(name))
    lengths = counting(tokenizer)
    for text in ("x" * (MAX_UNCUT_BYTES + 1), "国" * (MAX_UNCUT_BYTES // 3 + 1), "a b " * 20_000 + " " * 2**21):
        with pytest.raises(InvalidParameter, match="1048576 bytes in a row"):
            tokenizer.encode(text)
        assert sum(lengths) <= 2**17
    half = "x" * (MAX_UNCUT_BYTES // 2)
    assert tokenizer.encode(half) == whole(tokenizer, half)


@pytest.mark.parametrize("name", CUT | WHOLE)
def test_texts_have_no_fewer_tokens_than_their_length_shows(name: str) -> None:
    library = kind(name)
    least = least_tokens(library, model_tokens(library))
    assert (least is None) == name.startswith(
        ("bert", "unigram", "nfkc", "accents", "stripped", "the letter", "an expression")
    ) or "awkward" in name
    if least is None:
        return
    rng = random.Random(4)
    longest = max(kind(name).get_vocab(), key=len)
    texts = [hard_text(rng, 100) for _ in range(100)] + ["", longest * 100, "e\u0301" * 100, "\u1100\u1161\u11a8" * 100]
    for text in texts:
        assert least.of(text) <= len(kind(name).encode(text, add_special_tokens=False).ids), text


NORMALIZERS = [
    normalizers.NFC(),
    normalizers.NFD(),
    normalizers.NFKC(),
    normalizers.NFKD(),
    normalizers.Lowercase(),
    normalizers.BertNormalizer(),
    normalizers.Prepend("▁▁"),
    normalizers.Replace("a", "▁" * 5),
    normalizers.Replace("aa", "▁"),
    normalizers.Replace(Regex("a?"), "xyz"),
    normalizers.ByteLevel(),
    normalizers.Sequence([normalizers.Replace("a", "bb"), normalizers.Replace("b", "ccc"), normalizers.NFKD()]),
]


@pytest.mark.parametrize("normalizer", NORMALIZERS, ids=str)
def test_a_normalizer_makes_no_text_longer_than_its_settings_show(normalizer: normalizers.Normalizer) -> None:
    library = Library(models.BPE())
    library.normalizer = normalizer
    most = growth(library)
    rng = random.Random(5)
    for text in [*(hard_text(rng, 50) for _ in range(50)), "a" * 50, "\ufdfa" * 50, "İ" * 50, "国" * 50, "\u0390" * 50]:
        assert len(normalizer.normalize_str(text).encode()) <= most * len(text.encode())


@pytest.mark.slow
def test_a_text_that_a_normalizer_would_multiply_is_refused() -> None:
    library = Library.from_str(kind("gpt2").to_str())
    library.normalizer = normalizers.Sequence(
        [normalizers.Replace("a", "b" * 200), normalizers.Replace("b", "c" * 200)]
    )
    tokenizer = Tokenizer(library)
    assert tokenizer.encode("xyz") == whole(tokenizer, "xyz")
    with pytest.raises(InvalidParameter, match="bytes in a row"):
        tokenizer.encode("a" * 1000)


EXPRESSIONS = {
    "gpt2": GPT2,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "qwen3.5": QWEN35,
    "o200k": O200K,
    "tekken": TEKKEN,
    "cl100k": CL100K,
    "deepseek": DEEPSEEK,
    "numbers": r"\p{N}{1,3}",
    "kana and han": KANA_AND_HAN,
    "three digits": "[0-9][0-9][0-9]",
} | dict(zip(("line ends", "letters", "punctuation", "east asian"), DEEPSEEK_CODER, strict=True))


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_words_end_where_a_known_expression_ends_them(name: str) -> None:
    """On both sides of a cut are the words of the whole text; the library is the twin."""
    source, rng, ends = EXPRESSIONS[name], random.Random(name), Counter[bool | None]()
    split, words = pre_tokenizers.Split(Regex(source), "isolated"), WordEnds(source)

    def starts(text: str) -> set[int]:
        return {start for _, (start, _) in split.pre_tokenize_str(text)}

    for _ in range(60):
        text = hard_text(rng, 12)
        found = starts(text)
        for place in range(1, len(text)):
            is_end = words.ends(text[place - 1], text[place])
            ends[is_end] += 1
            if is_end is not None:
                assert is_end <= (place in found), (text, place)
                sides = starts(text[:place]) | {place + start for start in starts(text[place:])}
                assert sides - {place} == found - {place}, (text, place)
    assert ends[None] > 100
    assert ends[True] + ends[False] > 100


def test_every_expression_of_gguf_files_is_known_but_one() -> None:
    unknown = set()
    for row, (name, *_) in ROWS:
        for pattern in row.patterns:
            try:
                WordEnds(pattern)
            except Unsupported:
                unknown.add(name)
    assert unknown == {"deepseek-llm"}


@pytest.mark.parametrize("source", ["", "|", LLAMA3 + "|", LLAMA3 + "|x", r"(?<=a)b|" + LLAMA3, LLAMA3[:-2]])
def test_an_expression_with_an_unknown_part_is_unknown(source: str) -> None:
    with pytest.raises(Unsupported):
        WordEnds(source)


@pytest.mark.parametrize("name", ["spaces in words", "look-behind"])
def test_a_text_for_an_unknown_expression_is_tokenized_whole_within_a_limit(name: str) -> None:
    tokenizer = Tokenizer(kind(name))
    lengths = counting(tokenizer)
    text = "some words, " * (3 * PIECE_CHARS // 12)
    assert tokenizer.encode(text) == whole(tokenizer, text)
    assert max(lengths) == len(text)
    del lengths[:]
    with pytest.raises(InvalidParameter, match="1048576 bytes in a row that this model's tokenizer cannot divide"):
        tokenizer.encode("some words, " * (MAX_UNCUT_BYTES // 12 + 1))
    assert sum(lengths) <= 1, "refused before the library has it"


def test_finding_cuts_does_not_slow_down_with_added_tokens() -> None:
    """Each pair of characters is looked up in a set, not looked for in each token."""
    library = kind("llama3")
    library.add_tokens([f"<unused{idx}>" for idx in range(3000)])
    cuts = Cuts(library, model_tokens(library))
    assert isinstance(cuts._pairs, frozenset)
    assert cuts.can_cut("a", " ")
    assert not cuts.can_cut("u", "n")
    assert not cuts.can_cut(">", " ")


@pytest.mark.parametrize(
    ("vocab", "text"),
    [
        ({char: idx for idx, char in enumerate("ACGT")}, "GATTACA" * 12_000),
        ({char: idx for idx, char in enumerate("\u4e2d\u6587")}, "\u4e2d\u6587" * 40_000),
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_models_that_know_few_letters_read_long_texts(vocab: dict[str, int], text: str, special: bool) -> None:
    library = Library(models.BPE(vocab=vocab, merges=[]))
    library.add_special_tokens(["<s>"])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    tokenizer = Tokenizer(library)
    assert tokenizer.encode(text, add_special_tokens=special) == whole(tokenizer, text, special=special)


def test_an_added_token_that_a_normalizer_makes_nothing_of_is_refused() -> None:
    library = kind("stripped, awkward")
    library.add_tokens([AddedToken(" \n", normalized=True)])
    with pytest.raises(CheckpointError, match="normal form is empty"):
        Tokenizer(library)


def test_an_expanding_normalizer_refuses_only_texts_that_expand() -> None:
    library = Library(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("▁", -1.0)], unk_id=0))
    library.normalizer = normalizers.Sequence([normalizers.Replace("\u2126", "y" * 300), normalizers.Strip()])
    tokenizer = Tokenizer(library)
    text = "a" * 200_000
    assert growth(library) * len(text) > MAX_NORMALIZED_BYTES
    assert len(tokenizer.encode(text)) == len(text)
    with pytest.raises(InvalidParameter, match="cannot divide"):
        tokenizer.encode("\u2126" * 200_000)


# Normalizers of a `tokenizer.json` that multiply a text, a text of a few kilobytes that they make too long, and one
# that they leave short enough.
MULTIPLIERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "replaced string": (
        {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100_000},
        "a" * 3000,
        "b" * 3000 + "a",
    ),
    "replaced expression": (
        {"type": "Replace", "pattern": {"Regex": "[ab]"}, "content": "a" * 100_000},
        "b" * 3000,
        "x" * 3000 + "b",
    ),
    "sequence": (
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 300},
                {"type": "Replace", "pattern": {"String": "b"}, "content": "a" * 300},
            ],
        },
        "a" * 3000,
        "x" * 3000 + "a" * 9,
    ),
    "prefix": (
        {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "x" * 900},
                {"type": "Replace", "pattern": {"String": "x"}, "content": "a" * 140},
            ],
        },
        "x" * 30_000,
        "b" * 20,
    ),
    "compatibility forms": ({"type": "NFKC"}, "\ufdfa" * 300_000, "\ufdfa" * 30_000),
}
# Address space beside that of the imports: of a text of 3 MiB after normalization, and of the interpreter's own.
MULTIPLIED_BYTES = 700 << 20
ENCODE = """
import json, resource, sys
from pathlib import Path
from quire.errors import InvalidParameter
from quire.text.tokenizers.tokenizer import Tokenizer

taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[1]),) * 2)
for folder, text, short in json.loads(sys.stdin.read()):
    tokenizer = Tokenizer.from_folder(folder)
    try:
        tokenizer.encode(text)
        print("encoded")
    except InvalidParameter as error:
        print(error)
    print(len(tokenizer.encode(short)) > 0)
"""


def test_a_normalizer_that_multiplies_text_is_bounded(tmp_path: Path) -> None:
    inputs = []
    for name, (normalizer, text, short) in MULTIPLIERS.items():
        library = Library(models.BPE(vocab={char: idx for idx, char in enumerate("abx?")}, merges=[], unk_token="?"))
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(json.loads(library.to_str()) | {"normalizer": normalizer}))
        inputs.append((str(folder), text, short))
    command = [sys.executable, "-c", ENCODE, str(MULTIPLIED_BYTES)]
    done = subprocess.run(command, input=json.dumps(inputs), capture_output=True, text=True, check=True, timeout=300)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * len(MULTIPLIERS)
    for name, refusal, is_encoded in zip(MULTIPLIERS, lines[::2], lines[1::2], strict=True):
        assert re.match(r"prompt must be text without more than \d+ bytes in a row that this model", refusal), name
        assert is_encoded == "True", name
