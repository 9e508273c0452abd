"""Small real tokenizers, one for each way in which models write their tokens; and processes of templates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from quire.text.chat.rendering import Renderer
from quire.text.tokenizers.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's a dog's life, isn't it?",
    "naïve café déjà vu — “quotes” … 你好、世界 今天天气很好。 👩‍👩‍👧 🎉🎉 e\u0301",
    "    indented\n\tcode = {'a': [1, 2, 3]}\n",
] * 4
SPECIAL = ["<s>", "</s>", "<|end|>"]


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    """Processes that all tests of a file share."""
    renderer = Renderer()
    yield renderer
    renderer.close()


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """As in GPT-2, Llama 3 and Qwen."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens(["你好", " two words", "plain"])
    return Tokenizer(library, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """As in Llama 2 and Mistral: a mark for spaces, byte tokens for what is not in the vocabulary."""
    names = ["<unk>", "<s>", "</s>", "<|end|>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    names += [*"abcdefghijklmnopqrstuvwxyz.,'", "▁", "▁▁", "▁t", "▁a", "he", "▁the", "é", "你", "\ufffd"]
    merges = [("▁", "▁"), ("▁", "t"), ("▁", "a"), ("h", "e"), ("▁t", "he")]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    library = Library(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(SPECIAL)
    return Tokenizer(library, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def word_piece() -> Tokenizer:
    """As in BERT: tokens are words, `##` continues one."""
    names = ["[UNK]", "<s>", "</s>", "<|end|>", "the", "a", "dog", "##s", "##ing", ".", ",", "'", "s", "n't", "is"]
    names += ["你", "é", "##é", "🎉"]
    vocab = {name: token_id for token_id, name in enumerate(names)}
    library = Library(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    library.add_special_tokens(SPECIAL)
    return Tokenizer(library, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """As in T5 and other unigram models: a mark for spaces and nothing below a character."""
    pieces = [
        ("<unk>", 0.0),
        ("▁", -2.0),
        ("▁a", -2.0),
        ("▁the", -3.0),
        ("a", -3.0),
        ("b", -3.0),
        ("é", -4.0),
        ("▁▁", -4.0),
    ]
    library = Library(models.Unigram(pieces, unk_id=0))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")
    library.add_special_tokens(SPECIAL)
    return Tokenizer(library, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def every_tokenizer(
    byte_level: Tokenizer, byte_fallback: Tokenizer, word_piece: Tokenizer, metaspace: Tokenizer
) -> dict[str, Tokenizer]:
    """All of them, by name."""
    return {
        "byte_level": byte_level,
        "byte_fallback": byte_fallback,
        "word_piece": word_piece,
        "metaspace": metaspace,
    }
