"""Tokenizers from metadata of GGUF files: the same tokens and texts as those of the `tokenizers` library."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import GemmaTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_PATTERN
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN35_PATTERN

from quire.errors import CheckpointError, UnsupportedModel
from quire.models.checkpoints.checkpoint import locate
from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS, ROWS
from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.text.gguf_fields import BYTE, CONTROL, NORMAL, UNKNOWN, tokenizer_fields

PATH = Path("model.gguf")
CORPUS = [
    "The old sailor's boat didn't leave the harbour; he'd waited 1234567 days, and 89 more.",
    "Zażółć gęślą jaźń. Ένα μικρό καράβι. Съешь ещё этих мягких французских булок.",
    "春が来た。山に来た。 里に来た。 你好，世界！ 안녕하세요 세계",
    "def f(x):\n\treturn {'a': x ** 2, 'b': [1, 2, 3]}  # a comment\r\n\r\n    pass\n",
    "हिन्दी में लिखा हुआ पाठ, ภาษาไทย, עברית, العربية",
    "HTTPServer camelCase snake_case CONSTANT_NAME I'M SHE'LL they've",
]
LETTERS = (
    "abcdefghij KLMNO 0123456789 \n\r\t .,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+~` äöüßéèçñ ЖЩъя αβγ 春来山 안녕 हिन् "
    "\u0301\u200d\ufeff\u3000🦄👩‍👩‍👧🇫🇷 ▁ <|end|> <0x41> 's 'LL"
)


def texts(count: int, seed: int = 0) -> list[str]:
    """Return random texts of words, letters of all scripts, spaces and control tokens."""
    rng = random.Random(seed)
    words = [word for line in CORPUS for word in line.split(" ")]
    pieces = [*LETTERS, *words, "  ", "\n\n", "<|end|>", "<|user|>", "don't", "12345", "e\u0301", "\u0065\u0301x"]
    return [
        "".join(rng.choice(pieces) + rng.choice(("", "", " ")) for _ in range(rng.randrange(40))) for _ in range(count)
    ]


@cache
def byte_level(pre: str) -> tokenizers.Tokenizer:
    """Train a tokenizer with one of the known pre-tokenizers."""
    row = PRE_TOKENIZERS[pre]
    library = tokenizers.Tokenizer(BPE(ignore_merges=row.takes_words))
    splits: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in row.patterns
    ]
    if row.has_digits:
        splits.append(pre_tokenizers.Digits(individual_digits=True))
    splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not row.patterns))
    split = pre_tokenizers.Sequence(splits)
    if row.is_normalized:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer, library.decoder = split, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    library.train_from_iterator(CORPUS * 3, trainer)
    library.add_tokens([AddedToken("<|user|>", special=False, normalized=False)])
    return library


@cache
def sentencepiece(*, adds_space: bool) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Train a tokenizer of characters with bytes to fall back to; return it, and the fields of a file with scores."""
    normal = [normalizers.Prepend("▁")] if adds_space else []
    trained = tokenizers.Tokenizer(BPE())
    trained.normalizer = normalizers.Sequence([*normal, normalizers.Replace(" ", "▁")])
    trained.train_from_iterator(CORPUS[:1] * 3, trainers.BpeTrainer(vocab_size=150))
    pieces = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    # The score of a piece falls with its place, as sentencepiece has it; single letters are never made by merging.
    scores = [0.0] * 259 + [-float(idx) for idx in range(len(pieces))]
    merges = sorted(
        (-scores[ids[piece]], ids[piece[:middle]], ids[piece[middle:]], piece[:middle], piece[middle:])
        for piece in pieces
        for middle in range(1, len(piece))
        if piece[:middle] in ids and piece[middle:] in ids
    )
    pairs = [(left, right) for *_, left, right in merges]
    library = tokenizers.Tokenizer(BPE(ids, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = trained.normalizer
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    library.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": adds_space,
        "tokenizer.ggml.add_bos_token": False,
    }
    return library, fields


def check(library: tokenizers.Tokenizer, fields: dict[str, Any], count: int) -> None:
    """Compare ids of texts, and texts of ids."""
    found = Tokenizer.from_files(read_gguf_tokenizer(PATH, fields))
    rng = random.Random(1)
    for text in texts(count):
        ids = library.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False) == ids, text
        rng.shuffle(ids)
        assert found.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pre", [names[0] for _, names in ROWS])
def test_byte_level(pre: str, count: int) -> None:
    library = byte_level(pre)
    check(library, tokenizer_fields(library, pre, None, "<|end|>"), count)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("adds_space", [True, False])
def test_sentencepiece(adds_space: bool, count: int) -> None:
    check(*sentencepiece(adds_space=adds_space), count)


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_gemma4(count: int) -> None:
    trained, fields = sentencepiece(adds_space=False)
    merges = [(left, right) for left, right in json.loads(trained.to_str())["model"]["merges"]]
    ids = {token: token_id for token_id, token in enumerate(fields["tokenizer.ggml.tokens"])}
    tokens: Any = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None, "mask_token": None}
    library = GemmaTokenizer(**{"vocab": ids, "merges": merges} | tokens).backend_tokenizer
    fields = {name: value for name, value in fields.items() if not name.endswith(("scores", "prefix"))}
    fields |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    check(library, fields, count)
    found = Tokenizer.from_files(read_gguf_tokenizer(PATH, fields | {"tokenizer.ggml.add_bos_token": True}))
    assert found.encode("a")[0] == ids["<s>"]


def test_the_bundled_tokenizer() -> None:
    folder = locate("bundled")
    expected = Tokenizer.from_folder(folder)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    fields = tokenizer_fields(library, "gpt-2", "<|bos|>", "<|eos|>")
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    found = Tokenizer.from_files(read_gguf_tokenizer(PATH, fields | {"tokenizer.chat_template": template}))
    assert found.differs_at(expected) is None
    assert (found.bos_token_id, found.eos_token_id) == (expected.bos_token_id, expected.eos_token_id)
    assert found.special_ids == expected.special_ids
    for text in texts(300):
        assert found.encode(text) == expected.encode(text)
        assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))
    assert found.chat_template is not None
    assert found.chat_template.render([{"role": "user", "content": "Hi"}]) == "<|bos|>Hi"
    found.close()


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_the_default_of_the_first_token(pre: str, changes: dict[str, bool], expected: bool) -> None:
    fields = tokenizer_fields(byte_level(pre), pre, None, None)
    del fields["tokenizer.ggml.add_bos_token"]
    found = Tokenizer.from_files(read_gguf_tokenizer(PATH, fields | {"tokenizer.ggml.bos_token_id": 0} | changes))
    assert (found.encode("boat")[0] == 0) == expected


def test_patterns_are_those_of_published_tokenizers() -> None:
    assert PRE_TOKENIZERS["qwen2"].patterns == (QWEN2_PATTERN,)
    assert PRE_TOKENIZERS["qwen35"].patterns == (QWEN35_PATTERN,)


def test_control_tokens_of_phi3_absorb_spaces() -> None:
    """All but three do, as in the tokenizer that the model was published with."""
    library, fields = sentencepiece(adds_space=True)
    description = json.loads(library.to_str())
    for token in description["added_tokens"]:
        token["rstrip"] = token["content"] == "</s>"
    stripping = tokenizers.Tokenizer.from_str(json.dumps(description))
    check(stripping, fields | {"general.architecture": "phi3"}, 100)
    found = Tokenizer.from_files(read_gguf_tokenizer(PATH, fields | {"general.architecture": "phi3"}))
    for token in ("<s>", "</s>"):
        text = f"a{token}  \n a{token} a"
        assert found.encode(text) == stripping.encode(text, add_special_tokens=False).ids
        assert (found.encode(text) == library.encode(text, add_special_tokens=False).ids) == (token == "<s>")


FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.token_type": [1, 1, 1],
}


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with others, without the merges where they have a sentencepiece tokenizer."""
    fields = FIELDS | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    if changes.get("model") == "llama":
        del fields["tokenizer.ggml.merges"]
    return fields


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"model": "bert"}, UnsupportedModel, "tokenizer.ggml.model is 'bert', which is not read"),
        ({"pre": "klingon"}, UnsupportedModel, "tokenizer.ggml.pre is 'klingon', an unknown pre-tokenizer; known are"),
        (
            {"pre": "llama-bep"},
            UnsupportedModel,
            "an unknown pre-tokenizer; did you mean llama-bpe or llama-v3 or llama4",
        ),
        ({"pre": 3}, CheckpointError, "tokenizer.ggml.pre must be a string, got 3"),
        ({"tokens": []}, CheckpointError, "tokenizer.ggml.tokens must be at least one token"),
        ({"tokens": ["a", 1]}, CheckpointError, "tokenizer.ggml.tokens must be a list of strings"),
        ({"token_type": [1]}, CheckpointError, "tokenizer.ggml.token_type must be 3 integers"),
        ({"token_type": [1, 1, "a"]}, CheckpointError, "tokenizer.ggml.token_type must be 3 integers"),
        ({"merges": ["ab"]}, CheckpointError, "tokenizer.ggml.merges must be two tokens with a space"),
        ({"merges": ["a c"]}, CheckpointError, "tokenizer.ggml.merges must be two tokens with a space"),
        ({"merges": None}, CheckpointError, "tokenizer.ggml.merges must be a list of strings, got None"),
        ({"bos_token_id": "a"}, CheckpointError, "tokenizer.ggml.bos_token_id must be a token id"),
        ({"bos_token_id": 0, "add_bos_token": 1}, CheckpointError, "tokenizer.ggml.add_bos_token must be true or fal"),
        (
            {"bos_token_id": 3, "add_bos_token": True},
            CheckpointError,
            "bos_token_id must be a token id where tokenizer",
        ),
        (
            {"add_eos_token": True},
            CheckpointError,
            "eos_token_id must be a token id where tokenizer.ggml.add_eos_token",
        ),
        ({"model": "gemma4", "merges": None}, CheckpointError, "tokenizer.ggml.merges must be a list of strings, got"),
        ({"model": "llama"}, CheckpointError, "tokenizer.ggml.scores must be 3 finite numbers"),
        ({"model": "llama", "scores": [0.0, 1.0]}, CheckpointError, "tokenizer.ggml.scores must be 3 finite numbers"),
        ({"model": "llama", "scores": [0.0, 1.0, float("nan")]}, CheckpointError, "scores must be 3 finite numbers"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_gguf_tokenizer(PATH, changed(changes))


def test_tokens_too_long_to_derive_merges_from_are_refused() -> None:
    """The search would take the square of their length: hours for a file of some megabytes."""
    fields = changed({"model": "llama", "tokens": ["a", "b", "a" * (1 << 18)], "scores": [0.0, 0.0, 0.0]})
    with pytest.raises(CheckpointError, match=r"tokens whose squared lengths sum to at most 1,073,741,824"):
        read_gguf_tokenizer(PATH, fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            ({f"{name}_token_id": token_id}, f"tokenizer.ggml.{name}_token_id is {token_id:,}, which is none of the 3")
            for name in ("padding", "unknown", "bos", "eos")
            for token_id in (3, -1, 0xFFFFFFFF)
        ),
        ({"tokens": ["a", "b", "ab", "", ""], "token_type": [1] * 5}, "2 of tokenizer.ggml.tokens are empty"),
        (
            {"tokens": ["a", "b", "ab", "b"], "token_type": [1] * 4},
            "tokenizer.ggml.tokens has 'b' twice, as 1 and as 3",
        ),
    ],
    ids=str,
)
def test_what_a_tokenizer_does_not_need_is_only_logged(
    changes: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp loads such files; they are published."""
    files = read_gguf_tokenizer(PATH, changed(changes))
    assert words in caplog.text
    assert Tokenizer.from_files(files).encode("abb") == [2, 1]
    assert files.bos_token is None


def test_longer_lists_and_other_types_are_taken_as_llama_cpp_does() -> None:
    fields = changed({"token_type": [1, 0, 99, 3], "scores": [0.0] * 4})
    assert Tokenizer.from_files(read_gguf_tokenizer(PATH, fields)).encode("ab") == [2]
    scored = changed({"model": "llama", "scores": [0, -1, -2, -3], "add_space_prefix": False})
    assert Tokenizer.from_files(read_gguf_tokenizer(PATH, scored)).encode("ab") == [2]


def test_tokens_of_one_text_are_all_decoded() -> None:
    """The first is encoded; the text of another one is the same."""
    fields = changed({"tokens": ["a", "b", "ab", "b", "<x>", "<x>"], "token_type": [1, 1, 1, 1, 3, 3]})
    tokenizer = Tokenizer.from_files(read_gguf_tokenizer(PATH, fields))
    assert tokenizer.encode("b<x>") == [1, 4]
    assert tokenizer.decode([3, 2, 3, 5]) == "babb"
    assert tokenizer.decode([3, 5], skip_special_tokens=False) == "b<x>"
    assert [tokenizer.token_text(token_id) for token_id in range(6)] == ["a", "b", "ab", "b", "<x>", "<x>"]
    assert (tokenizer.special_ids, tokenizer.vocab_size) == ({4, 5}, 6)


def test_a_sentencepiece_file_without_special_tokens_has_the_usual_ones() -> None:
    _, fields = sentencepiece(adds_space=True)
    named = {"bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token"}
    bare = {name: value for name, value in fields.items() if name.rpartition(".")[2] not in named}
    files = read_gguf_tokenizer(PATH, bare)
    assert (files.bos_token, files.eos_token) == ("<s>", "</s>")
    assert Tokenizer.from_files(files).encode("boat")[0] == 1
    assert read_gguf_tokenizer(PATH, bare | {"tokenizer.ggml.bos_token_id": 2}).bos_token == "</s>"


def test_texts_of_gemma4_begin_with_a_token_whatever_the_file_says() -> None:
    """Published files say false, as if a template always wrote it; without it, the model writes nonsense."""
    fields = changed({"model": "gemma4", "bos_token_id": 1, "add_bos_token": False})
    assert Tokenizer.from_files(read_gguf_tokenizer(PATH, fields)).encode("ab") == [1, 2]


def test_a_template_that_is_no_text_is_none(caplog: pytest.LogCaptureFixture) -> None:
    for source in (3, ["default", "tool_use"]):
        assert read_gguf_tokenizer(PATH, FIELDS | {"tokenizer.chat_template": source}).chat_template is None
        assert "tokenizer.chat_template is" in caplog.text
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template must be a string of at most 1048576"):
        read_gguf_tokenizer(PATH, FIELDS | {"tokenizer.chat_template": "x" * (1 << 20 | 1)})


def test_special_tokens_have_the_names_that_templates_use() -> None:
    source = "{{ pad_token }}|{{ unk_token }}|{{ messages[0].content }}"
    fields = changed({"padding_token_id": 0, "unknown_token_id": 1}) | {"tokenizer.chat_template": source}
    template = read_gguf_tokenizer(PATH, fields).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "Hi"}]) == "a|b|Hi"
