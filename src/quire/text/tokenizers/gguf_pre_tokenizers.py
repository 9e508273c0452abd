"""The pre-tokenizers of byte-level BPE that GGUF files name, which divide a text into words before bytes are merged.

Each name is a key of `PRE_TOKENIZERS`. Files that were converted before May 2024 have no name; for such a file, the
family of the model is recognised by the size of its vocabulary and a control token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from typing import Final, NamedTuple

from tokenizers import Regex, pre_tokenizers

# Pieces of patterns that several families share: contractions, the rest of a text after words and numbers.
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_WORDS: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_LLAMA3: Final = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_WORDS}|\p{{N}}|{_REST}"
_SEED_CODER: Final = rf"{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST: Final = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
# DeepSeek's first models divide a text by several patterns in turn. The letters of DeepSeek LLM are cased letters,
# except scripts and symbols that were unknown to the library that generated its list.
_NEWLINE: Final = r"[\r\n]"
_EAST_ASIAN: Final = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_CASED_LETTERS: Final = (
    r"[[\p{Lu}\p{Ll}\p{Lt}]&&[^\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2F}\x{A790}-\x{AB6F}"
    r"\x{10570}-\x{105BF}\x{10D50}-\x{10D8F}\x{16E40}-\x{1DFFF}]]"
)
_PUNCTUATION: Final = r"[!-/:-~\x{2018}-\x{201F}\x{3000}-\x{3002}\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}]"
_DEEPSEEK_LLM: Final = (_NEWLINE, rf"\s?{_CASED_LETTERS}+", rf"\s?{_PUNCTUATION}+", r"\s+$", _EAST_ASIAN)
_DEEPSEEK_CODER: Final = (_NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN)


class PreTokenizer(NamedTuple):
    """A way to divide texts into words.

    Args:
        patterns: patterns that are applied in turn; each match, and each text between matches, becomes a word.
            Empty for GPT-2's pattern.
        has_digits: True if each digit is a word: divided before GPT-2's pattern, after other patterns.
        is_normalized: True if texts are normalised (NFC) first.
        takes_words: True if a word that is a token is encoded as this token, without merging its bytes.
        adds_bos: default for adding the BOS token before a text, if the file has no field for it.
    """

    patterns: tuple[str, ...] = ()
    has_digits: bool = False
    is_normalized: bool = False
    takes_words: bool = False
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Return the library's pre-tokenizer."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        if self.has_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns)
        return pre_tokenizers.Sequence([*steps, byte_level])


GPT2: Final = PreTokenizer()
DIGITS: Final = PreTokenizer(has_digits=True)
LLAMA3: Final = PreTokenizer((_LLAMA3,), takes_words=True, adds_bos=True)
QWEN2: Final = PreTokenizer((_QWEN2,))
GPT4O: Final = PreTokenizer((_GPT4O,), takes_words=True)
# Pre-tokenizers with their names.
ROWS: Final[tuple[tuple[PreTokenizer, tuple[str, ...]], ...]] = (
    (GPT2, ("gpt-2", "phi-2", "mellum", "a.x-4.0", "exaone4", "trillion", "granite-docling")),
    (DIGITS, ("smollm", "command-r", "refact", "starcoder", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (LLAMA3, ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0")),
    (LLAMA3._replace(adds_bos=False), ("smaug-bpe", "glm4")),
    (PreTokenizer((_LLAMA3,)), ("dbrx", "chatglm-bpe")),
    (PreTokenizer((_TEKKEN,), takes_words=True, adds_bos=True), ("tekken",)),
    (GPT4O, ("gpt-4o", "llama4", "kanana2")),
    (GPT4O._replace(takes_words=False), ("minimax-m2",)),
    (QWEN2._replace(is_normalized=True), ("qwen2",)),
    (QWEN2, ("deepseek-r1-qwen", "megrez", "kormo", "solar-open")),
    (PreTokenizer((_QWEN35,), is_normalized=True), ("qwen35",)),
    (PreTokenizer(_DEEPSEEK_LLM, has_digits=True), ("deepseek-llm",)),
    (PreTokenizer(_DEEPSEEK_CODER, has_digits=True), ("deepseek-coder",)),
    (PreTokenizer((_SEED_CODER,)), ("seed-coder",)),
)
# Name of a pre-tokenizer -> the pre-tokenizer.
PRE_TOKENIZERS: Final[dict[str, PreTokenizer]] = {name: row for row, names in ROWS for name in names}
# The name in files whose converter did not know the pre-tokenizer; treated like a missing name.
UNNAMED: Final = "default"


class Family(NamedTuple):
    """A family of models with files from before May 2024, which name no pre-tokenizer.

    Args:
        name: name of its pre-tokenizer.
        token: a control token of its vocabulary.
        sizes: sizes of vocabularies, from the first model's to sizes with additions and padding.
    """

    name: str
    token: str
    sizes: range


FAMILIES: Final = (
    Family("deepseek-r1-qwen", "<｜begin▁of▁sentence｜>", range(151_643, 152_129)),
    Family("qwen2", "<|im_start|>", range(151_643, 152_129)),
    Family("llama-bpe", "<|begin_of_text|>", range(128_256, 128_513)),
    Family("deepseek-coder", "<｜begin▁of▁sentence｜>", range(32_000, 32_513)),
    Family("deepseek-llm", "<｜begin▁of▁sentence｜>", range(100_000, 102_657)),
    Family("starcoder", "<fim_prefix>", range(49_152, 49_409)),
    Family("smollm", "<|im_start|>", range(49_152, 49_409)),
    Family("gpt-2", "<|endoftext|>", range(50_257, 51_201)),
)


def family_of(num_tokens: int, control_tokens: Collection[str]) -> str | None:
    """Return the name of the pre-tokenizer of a vocabulary's family; None for an unknown vocabulary."""
    families = (family for family in FAMILIES if num_tokens in family.sizes and family.token in control_tokens)
    return next((family.name for family in families), None)


def near_names(name: str) -> Iterator[str]:
    """Yield the known names that are most similar to an unknown one."""
    yield from get_close_matches(name, PRE_TOKENIZERS, n=3)
