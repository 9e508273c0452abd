"""The tokenizer of a model, with the chat template that the options name, and the tokens that end its answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from quire.config import ModelConfig
from quire.errors import ConfigError, RequestError, shown
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.models.families.encoders import find_encoder
from quire.platform.bounded.files import user_path
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tokenizers.ends import END_TEXTS, EndToken, describe, ends_by_text
from quire.text.tokenizers.gguf_tokenizer import end_texts, named_ends, read_gguf_tokenizer, tokens_of
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tokenizers.tokenizer_files import read_template

logger = logging.getLogger(__name__)


def open_tokenizer(options: ModelConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer; None if the options skip it.

    Raises:
        ConfigError: the files have no tokenizer that can be served, or an option does not apply to them.
    """
    path, fields, pre = checkpoint.gguf_path, checkpoint.gguf_fields, options.tokenizer_pre
    is_own = options.tokenizer is None
    if pre is not None and (fields is None or not is_own):
        raise ConfigError(
            f"tokenizer_pre is {shown(pre)}, but it is for the tokenizer of a GGUF file only: leave it out",
            field="tokenizer_pre",
        )
    if options.skip_tokenizer_init:
        return None
    if is_own and path is not None and fields is not None:
        tokenizer = Tokenizer.from_files(read_gguf_tokenizer(path, fields, pre))
    else:
        tokenizer = Tokenizer.from_folder(checkpoint.folder if options.tokenizer is None else locate(options.tokenizer))
    if options.chat_template is not None:
        tokenizer.chat_template = _template_of(tokenizer, options.chat_template)
    return tokenizer


def _template_of(tokenizer: Tokenizer, path: str) -> ChatTemplate:
    """Return the chat template in a file."""
    source = read_template(user_path(path))
    if source is None:
        raise ConfigError(f"chat_template {path!r} is no file", field="chat_template")
    try:
        template = tokenizer.make_chat_template(source)
        if template.used_variables({}, {"messages": None}):
            return template
    except RequestError as error:
        raise ConfigError(f"chat_template {path!r}: {error}", field="chat_template") from error
    raise ConfigError(f"chat_template {path!r} does not use the variable messages", field="chat_template")


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
