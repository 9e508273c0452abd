"""Text in and out: tokenizer, incremental detokenizer, chat templates."""

from quire.text.chat import ChatTemplate, normalise_messages, require_chat_template
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "normalise_messages", "require_chat_template"]
