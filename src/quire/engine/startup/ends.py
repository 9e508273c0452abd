"""The tokens that end the answers of a model, for stop rules, grammars, thinking and other uses."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from quire.models.checkpoints.checkpoint import Checkpoint
from quire.models.families.encoders import find_encoder
from quire.text.tokenizers.ends import END_TEXTS, EndToken, describe, ends_by_text
from quire.text.tokenizers.gguf_tokenizer import end_texts, named_ends, tokens_of
from quire.text.tokenizers.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def read_end_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the tokens that end an answer of a model, and name them in the log; see `find_ends`."""
    ends = find_ends(checkpoint, tokenizer)
    if find_encoder(checkpoint.config) is None:
        logger.info("Answers end at %s", describe(ends))
    return frozenset(end.token_id for end in ends)


def find_ends(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[EndToken, ...]:
    """Return the tokens that end an answer, first the tokens that the model's files name; none for an encoder.

    The tokenizer's end token is always one. A folder's end tokens are listed in generation_config.json; if it lists
    none, they are the end tokens of config.json and the special tokens with known texts. A GGUF file's end tokens are
    named by its fields; its control tokens with known texts are added.

    Args:
        checkpoint: the model's files.
        tokenizer: its tokenizer; None if the engine works on token ids only.
    """
    if find_encoder(checkpoint.config) is not None:
        return ()
    fields = checkpoint.gguf_fields
    named = [*checkpoint.eos_token_ids]
    texts: Mapping[int, str] = {}
    if fields is not None:
        named += named_ends(fields)
        texts = end_texts(fields)
    elif tokenizer is not None:
        added, special = tokenizer.added_ids, tokenizer.special_ids
        texts = ends_by_text({idx: text for text, idx in added.items() if idx in special}, {}, END_TEXTS)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        named.append(tokenizer.eos_token_id)
    found = [token_id for token_id in sorted(texts) if token_id not in named]
    if checkpoint.generation_config.get("eos_token_id") is not None:
        _warn_of_unlisted({token_id: texts[token_id] for token_id in found}, tokenizer)
        found = []

    def text_of(token_id: int) -> str:
        if tokenizer is not None:
            return tokenizer.token_text(token_id)
        tokens = [] if fields is None else tokens_of(fields)
        return str(tokens[token_id]) if token_id < len(tokens) else ""

    return (
        *(EndToken(token_id, text_of(token_id), False) for token_id in dict.fromkeys(named)),
        *(EndToken(token_id, texts[token_id], True) for token_id in found),
    )


def _warn_of_unlisted(texts: Mapping[int, str], tokenizer: Tokenizer | None) -> None:
    """Warn of tokens with known texts in the chat template that generation_config.json does not list."""
    template = None if tokenizer is None else tokenizer.chat_template
    if template is None:
        return
    unlisted = {token_id: text for token_id, text in texts.items() if text in template.source}
    for token_id, text in unlisted.items():
        logger.warning(
            "The chat template has the token %s (%d), and eos_token_id of generation_config.json does not list it: if "
            "it ends a turn, add it there, or give stop_token_ids with each request",
            *(text, token_id),
        )
