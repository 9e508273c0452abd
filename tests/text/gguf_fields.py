"""The metadata of a GGUF file for a tokenizer of the `tokenizers` library, as a converter writes it."""

from __future__ import annotations

import json
from typing import Any

import tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def tokenizer_fields(library: tokenizers.Tokenizer, pre: str, bos: str | None, eos: str | None) -> dict[str, Any]:
    """Return the fields of a byte-level tokenizer.

    Args:
        library: the tokenizer.
        pre: name of the pre-tokenizer.
        bos, eos: tokens that begin and end a text, or None; the former is put before texts.
    """
    model = json.loads(library.to_str())["model"]
    ids = library.get_vocab(with_added_tokens=True)
    added = library.get_added_tokens_decoder()
    tokens = sorted(ids, key=ids.__getitem__)
    types = [NORMAL] * len(tokens)
    for token_id, token in added.items():
        types[token_id] = CONTROL if token.special else USER_DEFINED
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.add_bos_token": bos is not None,
    }
    for name, text in (("bos", bos), ("eos", eos)):
        if text is not None:
            fields[f"tokenizer.ggml.{name}_token_id"] = ids[text]
    return fields
