"""Small tokenizers of every kind that models have, trained on the spot, and texts that are hard to divide."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
MARKS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
SMALL = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
LETTERS = r"[^\r\n\p{L}\p{N}]?"
ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"(?i:{CONTRACTIONS})|{LETTERS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
QWEN2 = LLAMA3.replace("{1,3}", "")
O200K = (
    rf"{LETTERS}[{MARKS}]*[{SMALL}]+(?i:{CONTRACTIONS})?|{LETTERS}[{MARKS}]+[{SMALL}]*(?i:{CONTRACTIONS})?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDS}"
)
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = O200K.replace(f"(?i:{CONTRACTIONS})?", "").replace("{1,3}", "")
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
# Tokenizers of DeepSeek divide a text by several expressions in turn.
KANA_AND_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-一\uac00-\ud7ff]+")
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it? I'LL say so: we've 1234567 reasons!",
    "naïve café déjà vu — “quotes” … 你好、世界 今天天气很好。我们去公园吧!",
    "안녕하세요 세계 привет мир. 👩‍👩‍👧 🎉🎉 e\u0301",
    "    indented\n\tcode = {'a': [1, 2, 3]}\r\n\n\nfor i in range(10):\n        print(i)  # done\n",
] * 4
SPECIAL = ["<s>", "</s>", "<|end|>"]
# Words are drawn from these.
WORDS = (
    "a", "the", "fox", "don't", "It'S", "I'LL", "we've", "x" * 40, "Straße", "ǅ", "İstanbul", "ΣΑΣ", "ﬃ",
    "naïve", "e\u0301e", "\u0301", "가", "\u1100\u1161\u11a8", "각\u11a8", "한국어", "国", "今天天气",
    "ひらがな", "カタカナ", "か\u3099", "привет", "नमस्ते", "สวัสดี", "مرحبا", "\ufdfa", "👩‍👩‍👧", "🎉",
    "1", "12", "1234567", "٣٤", "½", "Ⅷ", "²", " ", "  ", "     ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ",
    "\u00a0", "\u3000", "\u200b", "\u2028", "\x85", "\x00", ".", ",", "...", "!?", "'", "''", "-", "—", "_",
    "__init__", "(", ")", "[x]", "{}", "#", "/", "//", "\\", "。", "、", "「」", "▁", "▁a", "<s>", "</s>",
    "<|end|>", " <|end|> ", "stripped", "single", "two words", "Ünï", "xy", "12ab", "ab12", "$x$", "=", "==",
    "\ufffd", "\ue000", "\U0010ffff", "ſ", "K",
)  # fmt: skip


Splits = pre_tokenizers.PreTokenizer | pre_tokenizers.Sequence


def hard_text(rng: random.Random, num_words: int) -> str:
    """Return words of every kind in a row; now and then one of them many times."""
    words = []
    for _ in range(num_words):
        words.append(rng.choice(WORDS) * (rng.randint(2, 30) if rng.random() < 0.05 else 1))
        if rng.random() < 0.4:
            words.append(" ")
    return "".join(words)


def _bpe(*, pre: Splits, normal: normalizers.Normalizer | None = None, **options: Any) -> Library:
    """Train a byte-level tokenizer."""
    library = Library(models.BPE(**options))
    library.pre_tokenizer = pre
    if normal is not None:
        library.normalizer = normal
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    if options:  # training makes a model of its own
        for name, value in options.items():
            setattr(library.model, name, value)
    return library


def _split(*patterns: str, **options: Any) -> Library:
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _bpe(pre=pre_tokenizers.Sequence([*steps, byte_level]), **options)


def _marked(*, normal: normalizers.Normalizer | None, pre: Splits | None, prefix: bool) -> Library:
    """Train a tokenizer with a mark for spaces, and bytes for what it does not know."""
    trained = Library(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if prefix else "never")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIAL], show_progress=False)
    trained.train_from_iterator([text for text in CORPUS if text.isascii()], trainer)
    vocab = trained.get_vocab()
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [(left, right) for left, right in _merges(trained)]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    library = Library(model)
    if normal is not None:
        library.normalizer = normal
    if pre is not None:
        library.pre_tokenizer = pre
    library.add_special_tokens(SPECIAL)
    return library


def _merges(library: Library) -> list[list[str]]:
    return [
        merge if isinstance(merge, list) else merge.split(" ")
        for merge in json.loads(library.to_str())["model"]["merges"]
    ]


def _bert() -> Library:
    names = ["[UNK]", *SPECIAL, *"abcdefghijklmnopqrstuvwxyz0123456789.,'!?", "the", "##s", "##x", "fox", "##o", "国"]
    names += [f"##{char}" for char in "abcdefghijklmnpqrtuvwyz0123456789"]
    library = Library(models.WordPiece(vocab={name: idx for idx, name in enumerate(names)}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(SPECIAL)
    return library


def _unigram(*, split: bool) -> Library:
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library


def _with(make: Callable[[], Library], change: Callable[[Library], object]) -> Callable[[], Library]:
    def changed() -> Library:
        library = make()
        change(library)
        return library

    return changed


def _add_awkward(library: Library) -> None:
    library.add_tokens(
        [
            AddedToken("stripped", rstrip=True),
            AddedToken("[x]", lstrip=True, rstrip=True),
            AddedToken("single", single_word=True),
            AddedToken("two words"),
            AddedToken(" a t"),
            AddedToken("a t"),
            AddedToken("XY", normalized=True),
            AddedToken("b ", normalized=False),
            AddedToken("  ", normalized=False),
            AddedToken("fox", normalized=False),
            AddedToken("12ab", normalized=False),
            AddedToken("the"),
        ]
    )


def _frame(library: Library) -> None:
    ids = [(name, library.token_to_id(name)) for name in ("<s>", "</s>")]
    library.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)


def gpt2() -> Library:
    """As GPT-2's, and Granite's."""
    return _bpe(pre=pre_tokenizers.ByteLevel(add_prefix_space=False))


def llama2() -> Library:
    """As Llama 2's: no pre-tokenizer, all words are one."""
    normal = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _marked(normal=normal, pre=None, prefix=True)


def llama3() -> Library:
    """As Llama 3's."""
    return _split(LLAMA3)


def _falcon() -> Library:
    steps = [
        pre_tokenizers.Punctuation("contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        pre_tokenizers.Digits(),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ]
    return _bpe(pre=pre_tokenizers.Sequence(steps))


def _gemma() -> Library:
    pre = pre_tokenizers.Split(" ", "merged_with_previous")
    return _marked(normal=normalizers.Replace(" ", "▁"), pre=pre, prefix=False)


# By name; those that texts can be cut for.
CUT: dict[str, Callable[[], Library]] = {
    "gpt2": gpt2,
    "gpt2 with a space before": lambda: _bpe(pre=pre_tokenizers.ByteLevel()),
    "llama3": llama3,
    "llama3 without merges": lambda: _split(LLAMA3, ignore_merges=True),
    "qwen2": lambda: _split(QWEN2, normal=normalizers.NFC()),
    "o200k": lambda: _split(O200K),
    "cl100k": lambda: _split(CL100K),
    "tekken": lambda: _split(TEKKEN, ignore_merges=True),
    "qwen3.5": lambda: _split(QWEN35, normal=normalizers.NFC()),
    "deepseek": lambda: _split(r"\p{N}{1,3}", KANA_AND_HAN, DEEPSEEK),
    "deepseek coder": lambda: _split(*DEEPSEEK_CODER),
    "digits": lambda: _bpe(
        pre=pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "falcon": _falcon,
    "nfkc and lower case": lambda: _split(
        LLAMA3, normal=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    ),
    "llama2": llama2,
    "gemma": _gemma,
    "metaspace first": lambda: _marked(
        normal=None, pre=pre_tokenizers.Metaspace(prepend_scheme="first", split=False), prefix=True
    ),
    "metaspace always": lambda: _marked(normal=None, pre=pre_tokenizers.Metaspace(), prefix=True),
    "bert": _bert,
    "unigram": lambda: _unigram(split=True),
    "llama3, framed": _with(llama3, _frame),
    "gpt2, awkward": _with(gpt2, _add_awkward),
    "llama3, awkward and framed": _with(_with(llama3, _add_awkward), _frame),
    "llama2, awkward and framed": _with(_with(llama2, _add_awkward), _frame),
    "bert, awkward and framed": _with(_with(_bert, _add_awkward), _frame),
    "gpt2 with a space before, awkward": _with(lambda: _bpe(pre=pre_tokenizers.ByteLevel()), _add_awkward),
    "metaspace always, awkward": _with(
        lambda: _marked(normal=None, pre=pre_tokenizers.Metaspace(), prefix=True), _add_awkward
    ),
    "stripped, awkward": _with(lambda: _split(LLAMA3, normal=normalizers.Strip()), _add_awkward),
    "the letter for pieces is another": _with(
        lambda: _split(LLAMA3, normal=normalizers.Sequence([normalizers.Replace("a", "▁"), normalizers.Strip()])),
        lambda library: library.add_tokens([AddedToken("b", normalized=False)]),
    ),
}
# Those that texts cannot be cut for.
WHOLE: dict[str, Callable[[], Library]] = {
    "unigram of one word": lambda: _unigram(split=False),
    "a byte-level word": lambda: _bpe(
        pre=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), ignore_merges=True
    ),
    "dropout": _with(gpt2, lambda library: setattr(library.model, "dropout", 0.5)),
    "look-behind": lambda: _split(r"(?<=a)b|\p{L}+|\s+|."),
    "spaces in words": lambda: _split(r"[\p{L} ]+|\s+|[^\p{L} ]+"),
    "an expression is replaced": lambda: _split(LLAMA3, normal=normalizers.Replace(Regex(" {2,}"), " ")),
    "accents stripped": lambda: _split(
        LLAMA3, normal=normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    ),
    "twice": _with(
        gpt2, lambda library: setattr(library, "post_processor", processors.TemplateProcessing(single="$A $A"))
    ),
}


@cache
def kind(name: str) -> Library:
    """Return a tokenizer by its name."""
    return (CUT | WHOLE)[name]()
