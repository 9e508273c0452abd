"""Vocabularies of the size that released models have, as metadata of GGUF files; the same at each call.

Released vocabularies cannot be in the repository, and small ones hide what costs much for each token. These have as
many tokens and merges as Qwen 3 and Gemma 3, of about the same lengths; their texts are random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tokenizers.pre_tokenizers import ByteLevel

from tests.text.gguf_fields import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

PREFIX: Final = "tokenizer.ggml."
QWEN_SIZE: Final = 151_936
GEMMA_SIZE: Final = 262_144
MAX_CHARS: Final = 16
LETTERS: Final = "etaoinshrdlucmfwypvbgkqjxzETAOINSHRDLUCMFWYPVBGKQJXZ0123456789.,-_"


class Merged(NamedTuple):
    """Tokens that are made by merging, after those that are not.

    Args:
        tokens: texts of all tokens.
        pairs: the two tokens of each merge, in order.
    """

    tokens: list[str]
    pairs: list[tuple[str, str]]


def merge_randomly(start: Sequence[str], size: int, seed: int) -> Merged:
    """Join random pairs of tokens, early ones more often, until there are `size` tokens."""
    draw = random.Random(seed).random
    tokens, pairs, known = [*start], [], {*start}
    while len(tokens) < size:
        count = len(tokens)
        left, right = tokens[int(count * draw() ** 3)], tokens[int(count * draw() ** 3)]
        text = left + right
        if len(text) <= MAX_CHARS and text not in known:
            known.add(text)
            tokens.append(text)
            pairs.append((left, right))
    return Merged(tokens, pairs)


@cache
def qwen_size_fields() -> Mapping[str, Any]:
    """Return the fields of a byte-level tokenizer: 151,936 tokens, of which 151,387 are made by merges."""
    alphabet = ["Ġ", *LETTERS, *sorted({*ByteLevel.alphabet()} - {"Ġ", *LETTERS})]
    control, plain = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>"]
    tokens, pairs = merge_randomly(alphabet, QWEN_SIZE - 293, 1)
    unused = [f"[PAD{token_id}]" for token_id in range(len(tokens) + 5, QWEN_SIZE)]
    kinds = ((NORMAL, tokens), (CONTROL, control), (USER_DEFINED, plain), (UNUSED, unused))
    fields = _fields("gpt2", kinds) | {
        f"{PREFIX}pre": "qwen2",
        f"{PREFIX}merges": [f"{left} {right}" for left, right in pairs],
        f"{PREFIX}eos_token_id": len(tokens) + 2,
        f"{PREFIX}add_bos_token": False,
    }
    return MappingProxyType(fields)


@cache
def gemma_size_fields() -> Mapping[str, Any]:
    """Return the fields of a sentencepiece tokenizer: 262,144 tokens with scores, from which the merges follow."""
    letters = [
        "▁",
        *LETTERS,
        *(chr(code) for first, last in ((0x370, 0x600), (0x4E00, 0x6600)) for code in range(first, last)),
    ]
    unused, turns = [f"<unused{idx}>" for idx in range(99)], ["<start_of_turn>", "<end_of_turn>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    num_own = 4 + len(unused) + len(turns) + len(fallback)
    tokens, _ = merge_randomly(letters, GEMMA_SIZE - num_own, 2)
    kinds = (
        (CONTROL, ["<pad>", "<eos>", "<bos>"]),
        (UNKNOWN, ["<unk>"]),
        (UNUSED, unused),
        (CONTROL, turns),
        (BYTE, fallback),
        (NORMAL, tokens),
    )
    fields = _fields("llama", kinds) | {
        f"{PREFIX}scores": [0.0] * num_own + [-float(idx) for idx in range(len(tokens))],
        **{f"{PREFIX}{name}_token_id": idx for idx, name in enumerate(("padding", "eos", "bos", "unknown"))},
        f"{PREFIX}add_space_prefix": False,
    }
    return MappingProxyType(fields)


def _fields(model: str, kinds: Sequence[tuple[int, list[str]]]) -> dict[str, Any]:
    """Return the fields of a kind of tokenizer, its tokens, and their types."""
    return {
        f"{PREFIX}model": model,
        f"{PREFIX}tokens": [token for _, tokens in kinds for token in tokens],
        f"{PREFIX}token_type": [kind for kind, tokens in kinds for _ in tokens],
    }
