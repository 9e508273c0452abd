"""Prompts as users give them, made into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from quire.engine.inputs.embeddings import EmbeddingsReader
from quire.errors import InvalidParameter, PromptTooLong, UnsupportedFeature
from quire.sequences.media import Media
from quire.text.long_texts import TooManyTokens
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
# A compiled loop holds other threads up for its length.
CHECKED_AT_ONCE = 1 << 16
_ALLOWED = (
    'a string, a list of token ids, {"prompt": string} or {"prompt_token_ids": list of token ids}, or that and "media"'
)


class TokenPrompt(NamedTuple):
    """A prompt ready for the engine.

    Args:
        token_ids: never empty, each in `[0, vocab_size)`.
        text: the text it came from, None where it came as token ids.
        media: what some of the tokens stand for.
    """

    token_ids: list[int]
    text: str | None
    media: tuple[Media, ...] = ()


class PromptReader(NamedTuple):
    """Makes prompts into token ids, for one model.

    Args:
        tokenizer: None when the engine runs without one; then text is refused.
        vocab_size: token ids must lie below.
        max_model_len: a prompt must leave room for one more token.
        media_reader: None when the data plane computes no embeddings; then media are refused.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    media_reader: EmbeddingsReader | None = None

    def read(self, prompt: object, *, add_special_tokens: bool = True) -> TokenPrompt:
        """Make a prompt into token ids.

        Args:
            prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`; beside the latter, `media`. What
                was read before comes back as it is.
            add_special_tokens: have the tokenizer add what it adds to a text (a beginning-of-text token, say).

        Raises:
            InvalidParameter: another type, an empty prompt, a token id outside the vocabulary, text that is not
                Unicode, or media that cannot be; see `EmbeddingsReader`.
            PromptTooLong: more than `max_model_len - 1` tokens.
            UnsupportedFeature: text without a tokenizer, or media for a data plane that computes no embeddings.
        """
        if isinstance(prompt, TokenPrompt):
            return prompt
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str):
            read = TokenPrompt(self._encode(prompt, add_special_tokens=add_special_tokens), prompt)
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            read = TokenPrompt(self._check(prompt), None)
        else:
            raise InvalidParameter("prompt", prompt, _ALLOWED)
        if not read.token_ids:
            raise InvalidParameter("prompt", prompt, "at least one token long")
        return read

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self.tokenizer is None:
            raise UnsupportedFeature("prompt", "this engine runs without a tokenizer; give prompt_token_ids")
        most = self.max_model_len - 1
        try:
            token_ids = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=most)
        except TooManyTokens as error:
            raise too_long(error, most, self.max_model_len) from error
        if max(token_ids, default=0) >= self.vocab_size:
            raise InvalidParameter("prompt", max(token_ids), f"text whose token ids lie below {self.vocab_size}")
        return token_ids

    def _check(self, token_ids: Sequence[object]) -> list[int]:
        if len(token_ids) >= self.max_model_len:
            raise too_long(TooManyTokens(len(token_ids), is_exact=True), self.max_model_len - 1, self.max_model_len)
        return check_token_ids("prompt_token_ids", token_ids, self.vocab_size)

    def _read_mapping(self, prompt: Mapping[str, object], *, add_special_tokens: bool) -> TokenPrompt:
        given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        # Where media stand is counted in tokens, which a text does not show.
        known = {"prompt", "prompt_token_ids", *(("media",) if given == ["prompt_token_ids"] else ())}
        if len(given) != 1 or set(prompt) - known:
            raise InvalidParameter("prompt", sorted(map(str, prompt)), _ALLOWED)
        inner, media = prompt[given[0]], prompt.get("media")
        if isinstance(inner, str) != (given[0] == "prompt"):
            raise InvalidParameter(given[0], inner, "a string" if given[0] == "prompt" else "a list of token ids")
        whole = self.read(inner, add_special_tokens=add_special_tokens)
        if media is None:
            return whole
        if self.media_reader is None:
            raise UnsupportedFeature("media", "this engine computes no embeddings")
        return whole._replace(media=self.media_reader.read(media, len(whole.token_ids)))


def check_token_ids(name: str, token_ids: Sequence[object], vocab_size: int) -> list[int]:
    """Return token ids as a list.

    Args:
        name: of the field that they are in.
        token_ids: what may be some.
        vocab_size: they must lie below.

    Raises:
        InvalidParameter: naming the first one that is none.
    """
    found: list[Any] = list(token_ids)
    for start in range(0, len(found), CHECKED_AT_ONCE):
        part = found[start : start + CHECKED_AT_ONCE]
        # Compiled loops first: most lists are right.
        if not {*map(type, part)} <= {int} or not 0 <= min(part) <= max(part) < vocab_size:
            wrong = next(each for each in part if type(each) is not int or not 0 <= each < vocab_size)
            raise InvalidParameter(name, wrong, f"token ids from 0 to {vocab_size - 1}")
    return found


def too_long(error: TooManyTokens, limit: int, max_model_len: int) -> PromptTooLong:
    """Return the error for a text of too many tokens.

    Args:
        error: says how many there are.
        limit: how many there could be.
        max_model_len: the context length, which is the reason.
    """
    reason = f"the context length of {max_model_len} tokens"
    return PromptTooLong(error.num_tokens, limit, reason, is_exact=error.is_exact)
