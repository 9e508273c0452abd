"""The tokenizer of a model, with the chat template that the options name."""

from __future__ import annotations

from pathlib import Path

from quire.config import ModelConfig
from quire.errors import ConfigError, RequestError, shown
from quire.models.checkpoints.checkpoint import Checkpoint, locate
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.tokenizers.tokenizer_files import read_template


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
    source = read_template(Path(path).expanduser())
    if source is None:
        raise ConfigError(f"chat_template {path!r} is no file", field="chat_template")
    try:
        template = tokenizer.make_chat_template(source)
        if template.used_variables({}, {"messages": None}):
            return template
    except RequestError as error:
        raise ConfigError(f"chat_template {path!r}: {error}", field="chat_template") from error
    raise ConfigError(f"chat_template {path!r} does not use the variable messages", field="chat_template")
