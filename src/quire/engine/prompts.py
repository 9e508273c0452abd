"""Prompts as users give them, made into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.engine.media import MediaReader
from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.media import Media
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
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
        media_reader: None when the data plane computes no embeddings; then media are refused.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    media_reader: MediaReader | None = None

    def read(self, prompt: object, *, add_special_tokens: bool = True) -> TokenPrompt:
        """Make a prompt into token ids.

        Args:
            prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`; beside the latter, `media`.
            add_special_tokens: have the tokenizer add what it adds to a text (a beginning-of-text token, say).

        Raises:
            InvalidParameter: another type, an empty prompt, a token id outside the vocabulary, text that is not
                Unicode, or media that cannot be; see `MediaReader`.
            UnsupportedFeature: text without a tokenizer, or media for a data plane that computes no embeddings.
        """
        if isinstance(prompt, Mapping):
            return self._read_mapping(prompt, add_special_tokens=add_special_tokens)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UnsupportedFeature("prompt", "this engine runs without a tokenizer; give prompt_token_ids")
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            text: str | None = prompt
            if max(token_ids, default=0) >= self.vocab_size:
                raise InvalidParameter("prompt", max(token_ids), f"text whose token ids lie below {self.vocab_size}")
        elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
            token_ids, text = list(prompt), None
            for token_id in token_ids:
                if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                    raise InvalidParameter("prompt_token_ids", token_id, f"token ids from 0 to {self.vocab_size - 1}")
        else:
            raise InvalidParameter("prompt", prompt, _ALLOWED)
        if not token_ids:
            raise InvalidParameter("prompt", prompt, "at least one token long")
        return TokenPrompt(token_ids, text)

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
