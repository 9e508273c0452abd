"""Text in and out: tokenizer, incremental detokenizer, chat templates."""

from quire.text.chat.chat_template import ChatTemplate, require_chat_template
from quire.text.chat.messages import normalise_messages
from quire.text.tokenizers.detokenizer import IncrementalDetokenizer
from quire.text.tokenizers.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "Tokenizer", "normalise_messages", "require_chat_template"]
