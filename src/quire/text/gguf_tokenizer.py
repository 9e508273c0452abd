"""Tokenizers from the metadata of GGUF files.

A file names its tokenizer model and, for byte-level BPE, its pre-tokenizer. Both are rows of tables here; a name that
is in neither is refused, since a guess would be wrong for some texts only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from quire.errors import CheckpointError, UnsupportedModel, shown
from quire.text.chat_template import ChatTemplate
from quire.text.components import guarded
from quire.text.tokenizer_files import MAX_TEMPLATE_BYTES, TokenizerFiles

PREFIX: Final = "tokenizer.ggml."
CHAT_TEMPLATE: Final = "tokenizer.chat_template"
# Types of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# The control tokens of Phi-3 that do not absorb the spaces that follow.
UNSTRIPPED: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})
# Sum of the squared lengths of tokens up to which their halves are searched for: a vocabulary of 262,144 tokens of 16
# characters has 67 million.
MAX_SQUARED_CHARS: Final = 1 << 30
# Tokens that end a turn, of architectures whose files name the end of a text only.
TURN_ENDS: Final[Mapping[str, tuple[str, ...]]] = {
    "phi3": ("<|end|>",),
    "gpt-oss": ("<|return|>", "<|call|>"),
}
# Pieces of patterns that several families share: contractions, the rest of a text after words and numbers.
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"
)
_GPT4O: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_REST}"
)
# Name of a pre-tokenizer -> its split pattern; None for GPT-2's. Texts are not normalised ...
PATTERNS: Final[dict[str, str | None]] = {
    "gpt-2": None,
    "command-r": None,
    "refact": None,
    "smollm": None,
    "starcoder": None,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "pixtral": _LLAMA3,
    "dbrx": _LLAMA3,
    "lfm2": _LLAMA3,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
}
# ... except by these, which apply NFC. DIGITS split every digit off first; WHOLE_WORDS take a word that is a token
# without merging its bytes.
NORMALIZED: Final = frozenset({"qwen2", "qwen35"})
DIGITS: Final = frozenset({"command-r", "refact", "smollm", "starcoder"})
WHOLE_WORDS: Final = frozenset(PATTERNS) - {"gpt-2", "dbrx", "deepseek-r1-qwen"} - DIGITS - NORMALIZED
# A file with one of these that does not say otherwise has the BOS token before a text.
ADDS_BOS: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken"})


def read_gguf_tokenizer(path: Path, fields: Mapping[str, Any]) -> TokenizerFiles:
    """Build the tokenizer that the metadata of a file describes.

    Args:
        path: path of the file, for messages.
        fields: metadata by key.

    Raises:
        CheckpointError: a field is missing or wrong; the message names its key.
        UnsupportedModel: a kind of tokenizer that is not read.
    """
    vocabulary = _Vocabulary(path, fields)
    kind = fields.get(f"{PREFIX}model")
    if kind == "gpt2":
        library = _byte_level(vocabulary)
    elif kind in ("llama", "gemma4"):
        library = _sentencepiece(vocabulary, adds_space=kind == "llama", has_scores=kind == "llama")
    else:
        raise UnsupportedModel(
            f"{path}: {PREFIX}model is {shown(kind)}, which is not read; read are gpt2, llama and gemma4",
            field=f"{PREFIX}model",
        )
    vocabulary.add_special_tokens(library, strips=kind == "llama" and fields.get("general.architecture") == "phi3")
    bos, eos = vocabulary.token("bos_token_id"), vocabulary.token("eos_token_id")
    _frame_texts(library, vocabulary, bos, eos, adds_bos=kind != "gpt2" or fields.get(f"{PREFIX}pre") in ADDS_BOS)
    template = None
    source = fields.get(CHAT_TEMPLATE)
    if source is not None:
        if not isinstance(source, str) or len(source) > MAX_TEMPLATE_BYTES:
            raise vocabulary.wrong(CHAT_TEMPLATE, source, f"a string of at most {MAX_TEMPLATE_BYTES} characters")
        tools = fields.get(f"{CHAT_TEMPLATE}.tool_use")
        special = {
            f"{name}_token": token
            for name in ("bos", "eos", "padding", "unknown")
            if (token := vocabulary.token(f"{name}_token_id")) is not None
        }
        template = ChatTemplate(
            source,
            tool_source=tools if isinstance(tools, str) else None,
            bos_token=bos or "",
            eos_token=eos or "",
            special_tokens=special,
        )
    return TokenizerFiles(path, library, bos, eos, template)


def end_token_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a sequence: of a text, of a turn, of a message."""
    ids = [fields.get(f"{PREFIX}{name}_token_id") for name in ("eos", "eot", "eom")]
    architecture, tokens = fields.get("general.architecture"), fields.get(f"{PREFIX}tokens")
    if isinstance(architecture, str) and isinstance(tokens, list):
        ids += [tokens.index(token) for token in TURN_ENDS.get(architecture, ()) if token in tokens]
    return tuple(dict.fromkeys(token_id for token_id in ids if type(token_id) is int and token_id >= 0))


class _Vocabulary:
    """The tokens of a file, checked.

    Attributes:
        tokens: text of each token.
        types: type of each token.
        ids: token id by text.
    """

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path, self._fields = path, fields
        self.tokens = self.texts("tokens")
        if not self.tokens:
            raise self.wrong(f"{PREFIX}tokens", [], "at least one token")
        types = fields.get(f"{PREFIX}token_type", [NORMAL] * len(self.tokens))
        if not isinstance(types, list) or len(types) != len(self.tokens) or not {*types} <= {*range(8)}:
            raise self.wrong(f"{PREFIX}token_type", types, f"{len(self.tokens)} numbers from 0 to 7")
        self.types: list[int] = types
        # The library knows a text once; of tokens of one text, the first is what is encoded.
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            self.ids.setdefault(token, token_id)
        if len(self.ids) != len(self.tokens):
            twice = next(token for token_id, token in enumerate(self.tokens) if self.ids[token] != token_id)
            raise self.wrong(f"{PREFIX}tokens", twice, "texts that differ")

    def texts(self, name: str) -> list[str]:
        """Read a list of strings."""
        value = self._fields.get(f"{PREFIX}{name}")
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(f"{PREFIX}{name}", value, "a list of strings")
        return value

    def numbers(self, name: str) -> list[float]:
        """Read a number for each token."""
        value = self._fields.get(f"{PREFIX}{name}")
        count = len(self.tokens)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_finite, value)):
            raise self.wrong(f"{PREFIX}{name}", value, f"{count} finite numbers")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Read true or false."""
        value = self._fields.get(f"{PREFIX}{name}", default)
        if not isinstance(value, bool):
            raise self.wrong(f"{PREFIX}{name}", value, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Read a string."""
        value = self._fields.get(f"{PREFIX}{name}", default)
        if not isinstance(value, str):
            raise self.wrong(f"{PREFIX}{name}", value, "a string")
        return value

    def has(self, name: str) -> bool:
        """Return whether there is a field."""
        return f"{PREFIX}{name}" in self._fields

    def token(self, name: str) -> str | None:
        """Return the token of an id that a field has; None without the field."""
        token_id = self._fields.get(f"{PREFIX}{name}")
        if token_id is None:
            return None
        if type(token_id) is not int or not 0 <= token_id < len(self.tokens):
            raise self.wrong(f"{PREFIX}{name}", token_id, f"a token id from 0 to {len(self.tokens) - 1}")
        return self.tokens[token_id]

    def add_special_tokens(self, library: tokenizers.Tokenizer, *, strips: bool) -> None:
        """Have texts of control and user-defined tokens matched before the pre-tokenizer runs.

        Args:
            strips: control tokens absorb the spaces that follow, but for those of `UNSTRIPPED`.
        """
        special = [
            AddedToken(token, special=True, normalized=False, rstrip=strips and token not in UNSTRIPPED)
            for token in self._of_type(CONTROL)
        ]
        plain = [AddedToken(token, special=False, normalized=False) for token in self._of_type(USER_DEFINED)]
        library.add_special_tokens(special)
        library.add_tokens(plain)

    def _of_type(self, kind: int) -> list[str]:
        return [token for token, its in zip(self.tokens, self.types, strict=True) if its == kind and token]

    def wrong(self, key: str, value: object, allowed: str) -> CheckpointError:
        """Return the error for a field of another value than is allowed."""
        return CheckpointError(f"{self._path}: {key} must be {allowed}, got {shown(value)}", field=key)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """Build a tokenizer that merges the bytes of the parts of a text."""
    name = vocabulary.text("pre", "gpt-2")
    if name not in PATTERNS:
        raise UnsupportedModel(
            f"{PREFIX}pre is {shown(name)}, an unknown pre-tokenizer; known are {', '.join(PATTERNS)}",
            field=f"{PREFIX}pre",
        )
    is_whole = name in WHOLE_WORDS
    library = tokenizers.Tokenizer(
        guarded(BPE, vocabulary.ids, _merges(vocabulary), fuse_unk=False, byte_fallback=False, ignore_merges=is_whole)
    )
    pattern = PATTERNS[name]
    if name in NORMALIZED:
        library.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    steps: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Digits(individual_digits=True)] * (name in DIGITS)
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    library.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    library.decoder = decoders.ByteLevel()
    return library


def _sentencepiece(vocabulary: _Vocabulary, *, adds_space: bool, has_scores: bool) -> tokenizers.Tokenizer:
    """Build a tokenizer that merges the characters of a text with ▁ in place of spaces.

    Args:
        adds_space: default of `add_space_prefix`.
        has_scores: a file without merges has scores, from which they follow.
    """
    unknown = vocabulary.token("unknown_token_id")
    library = tokenizers.Tokenizer(
        guarded(
            BPE,
            vocabulary.ids,
            _merges_by_score(vocabulary) if has_scores and not vocabulary.has("merges") else _merges(vocabulary),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
        )
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", adds_space):
        steps.insert(0, normalizers.Prepend("▁"))
        undo.append(decoders.Strip(" ", 1, 0))
    library.normalizer = normalizers.Sequence(steps)
    library.decoder = decoders.Sequence(undo)
    return library


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges of a file."""
    ids, merges = vocabulary.ids, []
    for merge in vocabulary.texts("merges"):
        # No token of these alphabets has a space in it, so the first one separates the two.
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.wrong(f"{PREFIX}merges", merge, "two tokens with a space between them, whose join is one")
        merges.append((left, right))
    return merges


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of tokens whose join is a token, the best score first.

    Raises:
        CheckpointError: tokens are so long that the search for pairs would take minutes.
    """
    tokens, ids = vocabulary.tokens, vocabulary.ids
    total = sum(len(token) ** 2 for token in tokens)
    if total > MAX_SQUARED_CHARS:
        allowed = f"tokens whose squared lengths sum to at most {MAX_SQUARED_CHARS:,} where merges are missing"
        raise vocabulary.wrong(f"{PREFIX}tokens", total, allowed)
    merges = []
    for token, score, kind in zip(tokens, vocabulary.numbers("scores"), vocabulary.types, strict=True):
        if kind not in (NORMAL, USER_DEFINED, UNUSED):
            continue
        for middle in range(1, len(token)):
            # Most halves are no tokens: the second one is made only where the first one is.
            left = token[:middle]
            if left in ids:
                right = token[middle:]
                if right in ids:
                    merges.append((-score, ids[left], ids[right]))
    merges.sort()
    return [(tokens[left], tokens[right]) for _, left, right in merges]


def _frame_texts(
    library: tokenizers.Tokenizer, vocabulary: _Vocabulary, bos: str | None, eos: str | None, *, adds_bos: bool
) -> None:
    """Have the tokens put around a text that the file wants there."""
    first = [bos] if bos is not None and vocabulary.flag("add_bos_token", adds_bos) else []
    last = [eos] if eos is not None and vocabulary.flag("add_eos_token", False) else []
    if not first and not last:
        return
    library.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *first, "$B", *last],
        special_tokens=[(token, vocabulary.ids[token]) for token in {*first, *last}],
    )
