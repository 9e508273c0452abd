"""Converts prompts of users to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.engine.inputs.prompt_names import IMAGES
from quire.errors import InvalidParameter, PromptTooLong, UnsupportedFeature
from quire.sequences.media import Media
from quire.text.chat.chat_prompt import ChatPrompt
from quire.text.chat.images import ChatImage
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.text.vocabulary.long_texts import TooManyTokens

if TYPE_CHECKING:  # a process that only reads prompts does not import torch
    from quire.engine.inputs.embeddings import EmbeddingsReader
    from quire.engine.inputs.images.reader import ImageReader

Prompt = str | ChatPrompt | Sequence[int] | Mapping[str, object]
# Tokens checked at a time: a compiled loop holds the interpreter lock, and other threads wait.
CHECKED_AT_ONCE = 1 << 16
_ALLOWED = (
    'a string, a list of token ids, {"prompt": string} or {"prompt_token_ids": list of token ids}, or that and "media"'
    ' or "multi_modal_data"'
)


class TokenPrompt(NamedTuple):
    """A prompt ready for the engine.

    Args:
        token_ids: token ids, never empty, each in `[0, vocab_size)`.
        text: text of the prompt, None for a prompt of token ids.
        media: embeddings that replace the embeddings of some tokens.
    """

    token_ids: list[int]
    text: str | None
    media: tuple[Media, ...] = ()


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts of one prompt, such as a query and a document.

    Args:
        first, second: the texts.
    """

    first: str
    second: str


class PromptReader(NamedTuple):
    """Converts prompts to token ids, for one model.

    Args:
        tokenizer: the tokenizer; None refuses text.
        vocab_size: exclusive upper limit of token ids.
        max_model_len: context length.
        media_reader: reader of media; None if the data plane accepts no embeddings, which are refused then.
        is_encoder: True if a prompt may fill the context; else it must leave room for one more token.
        image_reader: reader of images; None for a model without an encoder of images, which are refused then.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    media_reader: EmbeddingsReader | None = None
    is_encoder: bool = False
    image_reader: ImageReader | None = None

    @property
    def max_prompt_len(self) -> int:
        """Maximum number of tokens of a prompt."""
        return self.max_model_len if self.is_encoder else self.max_model_len - 1

    def read(self, prompt: object, *, add_special_tokens: bool = True) -> TokenPrompt:
        """Convert a prompt to token ids."""
        if isinstance(prompt, TokenPrompt):
            return prompt
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str | ChatPrompt):
            text = prompt if isinstance(prompt, str) else prompt.text
            if isinstance(prompt, ChatPrompt) and prompt.images and self.image_reader is not None:
                prompt = self.image_reader.written(prompt)
            read = TokenPrompt(self._encode(prompt, add_special_tokens=add_special_tokens), text)
            if isinstance(prompt, ChatPrompt) and prompt.images:
                return self._with_images(read, chat_images=prompt.images)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            read = TokenPrompt(self._check(prompt), None)
        else:
            raise InvalidParameter("prompt", prompt, _ALLOWED)
        if not read.token_ids:
            raise InvalidParameter("prompt", prompt, "at least one token long")
        return read

    def truncate(self, prompt: object, num_tokens: int, *, add_special_tokens: bool = True) -> Any:
        """Return the first tokens of a prompt; a text keeps its special tokens."""
        limit = self._kept_tokens(num_tokens)
        if isinstance(prompt, Mapping) and len(prompt) == 1:
            (prompt,) = prompt.values()
        if isinstance(prompt, str) and self.tokenizer is not None:
            kept = self.tokenizer.encode_first(prompt, limit, add_special_tokens=add_special_tokens)
            return TokenPrompt(check_token_ids("prompt", kept, self.vocab_size), prompt) if kept else prompt
        return prompt[:limit] if isinstance(prompt, list | tuple) else prompt

    def read_pair(self, pair: TextPair, truncate_prompt_tokens: int | None) -> tuple[TokenPrompt, int | None]:
        """Convert two texts to the token ids of one prompt, with the tokenizer's special tokens for a pair."""
        if self.tokenizer is None:
            raise UnsupportedFeature("prompt", "this engine runs without a tokenizer; give prompt_token_ids")
        limit = None if truncate_prompt_tokens is None else self._kept_tokens(truncate_prompt_tokens)
        token_ids, second_start = self.tokenizer.encode_pair(pair.first, pair.second, num_tokens=limit)
        if not token_ids:
            raise InvalidParameter("prompt", pair.first, "at least one token long, with its pair")
        return TokenPrompt(self._check(token_ids), None), second_start

    def num_leading(self, text: str, *, add_special_tokens: bool = True) -> int:
        """Return the number of tokens of a text at the beginning of others, without a special token at its end."""
        token_ids = self._encode(text, add_special_tokens=add_special_tokens)
        ends = self.tokenizer is not None and token_ids and token_ids[-1] in self.tokenizer.special_ids
        return len(token_ids) - bool(ends)

    def _kept_tokens(self, truncate_prompt_tokens: int) -> int:
        """Return the number of tokens that `truncate_prompt_tokens` keeps."""
        most = self.max_prompt_len
        if truncate_prompt_tokens > most:
            raise InvalidParameter("truncate_prompt_tokens", truncate_prompt_tokens, f"-1, or at most {most}")
        return most if truncate_prompt_tokens == -1 else truncate_prompt_tokens

    def _encode(self, text: str | ChatPrompt, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise UnsupportedFeature("prompt", "this engine runs without a tokenizer; give prompt_token_ids")
        most = self.max_prompt_len
        try:
            token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=most)
        except TooManyTokens as error:
            raise too_long(error, most, self.max_model_len) from error
        if max(token_ids, default=0) >= self.vocab_size:
            raise InvalidParameter("prompt", max(token_ids), f"text whose token ids lie below {self.vocab_size}")
        return token_ids

    def _check(self, token_ids: Sequence[object]) -> list[int]:
        if len(token_ids) > self.max_prompt_len:
            raise too_long(TooManyTokens(len(token_ids), is_exact=True), self.max_prompt_len, self.max_model_len)
        return check_token_ids("prompt_token_ids", token_ids, self.vocab_size)

    def _read_mapping(self, prompt: Mapping[str, object], *, add_special_tokens: bool) -> TokenPrompt:
        names = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        # Offsets of media count tokens, so they need a prompt of token ids.
        allowed = {"prompt", "prompt_token_ids", IMAGES, *(("media",) if names == ["prompt_token_ids"] else ())}
        if len(names) != 1 or set(prompt) - allowed:
            raise InvalidParameter("prompt", sorted(map(str, prompt)), _ALLOWED)
        inner, media = prompt[names[0]], prompt.get("media")
        if isinstance(inner, str) != (names[0] == "prompt"):
            raise InvalidParameter(names[0], inner, "a string" if names[0] == "prompt" else "a list of token ids")
        if isinstance(inner, str) and prompt.get(IMAGES) is not None and self.image_reader is not None:
            inner = self.image_reader.written(inner)
        whole = self.read(inner, add_special_tokens=add_special_tokens)
        if prompt.get(IMAGES) is not None:
            if media is not None:
                raise InvalidParameter(IMAGES, sorted(map(str, prompt)), "left out beside media")
            return self._with_images(whole, prompt[IMAGES])
        if media is None:
            return whole
        if self.media_reader is None:
            raise UnsupportedFeature("media", "this engine computes no embeddings")
        return whole._replace(media=self.media_reader.read(media, len(whole.token_ids)))

    def _with_images(
        self, prompt: TokenPrompt, value: object = None, chat_images: Sequence[ChatImage] = ()
    ) -> TokenPrompt:
        """Return a prompt with images, of a chat or else of the field `IMAGES`, in place of their placeholders."""
        reader, token_ids = self.image_reader, prompt.token_ids
        if reader is None:
            raise UnsupportedFeature(IMAGES, "this engine has no encoder of images")
        try:
            if chat_images:
                token_ids, media = reader.read_chat(chat_images, token_ids, self.max_prompt_len)
            else:
                token_ids, media = reader.read(value, token_ids, self.max_prompt_len)
        except TooManyTokens as error:
            raise too_long(error, self.max_prompt_len, self.max_model_len) from error
        return prompt._replace(token_ids=token_ids, media=media)


def check_token_ids(name: str, token_ids: Sequence[object], vocab_size: int) -> list[int]:
    """Return token ids as a list.

    Args:
        name: name of the field with the token ids.
        token_ids: values to check.
        vocab_size: exclusive upper limit of token ids.

    Raises:
        InvalidParameter: a value is no token id; the error names the first.
    """
    ids: list[Any] = list(token_ids)
    for start in range(0, len(ids), CHECKED_AT_ONCE):
        part = ids[start : start + CHECKED_AT_ONCE]
        # Compiled loops first: most lists are valid.
        if not {*map(type, part)} <= {int} or not 0 <= min(part) <= max(part) < vocab_size:
            wrong = next(token_id for token_id in part if type(token_id) is not int or not 0 <= token_id < vocab_size)
            raise InvalidParameter(name, wrong, f"token ids from 0 to {vocab_size - 1}")
    return ids


def too_long(error: TooManyTokens, limit: int, max_model_len: int) -> PromptTooLong:
    """Return the error for a text of too many tokens."""
    reason = f"the context length of {max_model_len} tokens"
    return PromptTooLong(error.num_tokens, limit, reason, is_exact=error.is_exact)
