"""The pre-tokenizers of GGUF files: names, files without one, and the option that names one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel

from quire.config import ModelConfig
from quire.engine.startup.tokenizers import open_tokenizer
from quire.errors import ConfigError
from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.gguf.architectures import ARCHITECTURES
from quire.text.tokenizers.gguf_pre_tokenizers import PRE_TOKENIZERS, family_of
from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from quire.text.tokenizers.tokenizer import Tokenizer

PATH = Path("model.gguf")
ALPHABET = sorted(ByteLevel.alphabet())
# Numbers of up to three digits, and of four, which only some ways to divide a text can reach.
TOKENS = [*ALPHABET, "12", "123", "1234"]


def numbers(size: int = 0, *control: str, **others: Any) -> dict[str, Any]:
    """Return the fields of a tokenizer that joins digits, of at least `size` tokens, the last ones control tokens."""
    filler = [f"[PAD{idx}]" for idx in range(size - len(TOKENS) - len(control))]
    tokens = [*TOKENS, *filler, *control]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - len(control)) + [3] * len(control),
        "tokenizer.ggml.merges": ["1 2", "12 3", "123 4"],
    }
    return fields | {f"tokenizer.ggml.{name}": value for name, value in others.items()}


def division(fields: dict[str, Any], pre: str | None = None) -> list[str]:
    """Return the tokens of a number."""
    return read_gguf_tokenizer(PATH, fields, pre).library.encode("12345").tokens


@pytest.mark.parametrize(
    ("size", "control", "pre", "expected"),
    [
        (128_256, "<|begin_of_text|>", "llama-bpe", ["123", "4", "5"]),
        (128_258, "<|begin_of_text|>", "llama-bpe", ["123", "4", "5"]),
        (151_646, "<|im_start|>", "qwen2", ["1", "2", "3", "4", "5"]),
        (151_936, "<|im_start|>", "qwen2", ["1", "2", "3", "4", "5"]),
        (152_064, "<｜begin▁of▁sentence｜>", "deepseek-r1-qwen", ["1", "2", "3", "4", "5"]),
        (49_152, "<fim_prefix>", "starcoder", ["1", "2", "3", "4", "5"]),
        (32_256, "<｜begin▁of▁sentence｜>", "deepseek-coder", ["1", "2", "3", "4", "5"]),
        (50_257, "<|endoftext|>", "gpt-2", ["1234", "5"]),
    ],
)
@pytest.mark.parametrize("others", [{}, {"pre": "default"}])
def test_a_file_without_a_name_has_that_of_its_vocabulary(
    size: int,
    control: str,
    pre: str,
    expected: list[str],
    others: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Files of before May 2024 have none, and converters that did not know it wrote "default"."""
    assert family_of(size, [control]) == pre
    assert division(numbers(size, control, **others)) == expected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("size", "control"), [(128_256, "<s>"), (100_352, "<|begin_of_text|>"), (0, "<|im_start|>")])
def test_an_unknown_vocabulary_is_divided_as_gpt2_does_with_a_warning(
    size: int, control: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert family_of(size, [control]) is None
    assert division(numbers(size, control)) == ["1234", "5"]
    assert "tokenizer.ggml.pre is missing, and the vocabulary is of no known family" in caplog.text
    assert "The option tokenizer_pre names another way" in caplog.text


def test_the_option_names_one(caplog: pytest.LogCaptureFixture) -> None:
    assert division(numbers(), "llama-bpe") == ["123", "4", "5"]
    # In place of an unknown one, and of a known one that is wrong.
    assert division(numbers(pre="klingon"), "llama-bpe") == ["123", "4", "5"]
    assert division(numbers(pre="llama-bpe"), "qwen2") == ["1", "2", "3", "4", "5"]
    assert not caplog.records
    with pytest.raises(
        ConfigError, match=r"tokenizer_pre is 'qwen', an unknown pre-tokenizer; did you mean qwen2 or qwen35"
    ):
        division(numbers(), "qwen")
    sentencepiece = numbers(model="llama", scores=[0.0] * len(TOKENS))
    with pytest.raises(ConfigError, match=r"tokenizer_pre is 'qwen2', but model\.gguf has a tokenizer of the model"):
        division(sentencepiece, "qwen2")


def test_the_option_is_for_gguf_files_only(tmp_path: Path) -> None:
    def opened(fields: dict[str, Any] | None, **options: Any) -> Tokenizer | None:
        checkpoint = Checkpoint(tmp_path, {}, {}, {}, fields, gguf_path=PATH)
        return open_tokenizer(ModelConfig(tokenizer_pre="llama-bpe", **options), checkpoint)

    tokenizer = opened(numbers())
    assert tokenizer is not None
    assert len(tokenizer.encode("12345")) == 3
    for fields, options in ((None, {}), (numbers(), {"tokenizer": "bundled"})):
        with pytest.raises(ConfigError, match="tokenizer_pre is 'llama-bpe', but it is for the tokenizer of a GGUF"):
            opened(fields, **options)


@pytest.mark.parametrize(
    ("shared", "names"),
    [
        ("gpt-2", ["phi-2", "mellum", "a.x-4.0", "exaone4"]),
        ("smollm", ["minerva-7b", "codeshell", "exaone", "mellum2"]),
        ("llama-bpe", ["midm-2.0"]),
        ("deepseek-r1-qwen", ["megrez", "kormo", "solar-open"]),
        ("smaug-bpe", ["glm4"]),
        ("dbrx", ["chatglm-bpe"]),
        ("gpt-4o", ["kanana2"]),
    ],
)
def test_names_that_share_a_way(shared: str, names: list[str]) -> None:
    assert {PRE_TOKENIZERS[name] for name in names} == {PRE_TOKENIZERS[shared]}


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        # Newlines and digits are by themselves, and what no pattern matches; a space belongs to the word after it.
        ("deepseek-coder", "if x2 == 10:\n\treturn", ["if", " x", "2", " == ", "1", "0", ":", "\n", "\treturn"]),
        ("deepseek-llm", "Tom's 42 cats!\n", ["Tom", "'", "s", " ", "4", "2", " cats", "!", "\n"]),
        # The list of punctuation has the Latin letters without accents too, so that others divide a word.
        ("deepseek-llm", "naïve 春が来た Σ ա", ["na", "ï", "ve", " ", "春が来た", " Σ", " ա"]),
        ("seed-coder", "I'll go!!\n\n42", ["I", "'ll", " go", "!!", "\n\n", "4", "2"]),
        ("qwen2", "I'll go!!\n\n42", ["I", "'ll", " go", "!!\n\n", "4", "2"]),
        ("glm4", "I'll goFor!!\n\n1234", ["I", "'ll", " goFor", "!!\n\n", "123", "4"]),
        ("minimax-m2", "I'll goFor!!\n\n1234", ["I'll", " go", "For", "!!\n\n", "123", "4"]),
    ],
)
def test_how_texts_are_divided(pre: str, text: str, words: list[str]) -> None:
    divided = [text[start:end] for _, (start, end) in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)]
    assert divided == words


# Architecture of files -> names of pre-tokenizers that its files have, as far as they are known.
NAMES = {
    "chatglm": "chatglm-bpe",
    "falcon-h1": "falcon-h1",
    "glm4": "glm4",
    "glm4moe": "glm4 solar-open",
    "gpt-oss": "gpt-4o",
    "gpt2": "gpt-2",
    "granite": "refact dbrx",
    "granitehybrid": "dbrx",
    "granitemoe": "refact",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2",
    "llama": "llama-bpe falcon3 smollm deepseek-llm deepseek-coder midm-2.0",
    "llama4": "llama4",
    "minimax-m2": "minimax-m2",
    "mistral3": "tekken",
    "nemotron_h": "pixtral",
    "nemotron_h_moe": "pixtral",
    "olmo2": "dbrx",
    "phi3": "gpt-4o dbrx",
    "qwen2": "qwen2 deepseek-r1-qwen megrez",
    "qwen2vl": "qwen2",
    "qwen3": "qwen2",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen3moe": "qwen2",
    "qwen3next": "qwen2",
    "qwen3vl": "qwen2",
    "qwen3vlmoe": "qwen2",
    "seed_oss": "seed-coder",
    "smollm3": "smaug-bpe",
}


def test_the_names_of_every_architecture_are_known() -> None:
    """A model whose layers are read is of no use if the tokenizer of its file is refused."""
    assert set(NAMES) == {name for name in ARCHITECTURES if not name.startswith("gemma")}
    assert {name for names in NAMES.values() for name in names.split()} <= set(PRE_TOKENIZERS)
