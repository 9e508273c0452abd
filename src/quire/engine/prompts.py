"""Prompts as users give them, made into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, object]
_ALLOWED = 'a string, a list of token ids, {"prompt": string} or {"prompt_token_ids": list of token ids}'


class TokenPrompt(NamedTuple):
    """A prompt ready for the engine.

    Args:
        token_ids: never empty, each in `[0, vocab_size)`.
        text: the text it came from, None where it came as token ids.
    """

    token_ids: list[int]
    text: str | None


def to_tokens(
    prompt: object, tokenizer: Tokenizer | None, vocab_size: int, *, add_special_tokens: bool = True
) -> TokenPrompt:
    """Make a prompt into token ids.

    Args:
        prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
        tokenizer: None when the engine runs without one; then text is refused.
        vocab_size: token ids must lie below.
        add_special_tokens: have the tokenizer add what it adds to a text (a beginning-of-text token, say).

    Raises:
        InvalidParameter: another type, an empty prompt, a token id outside the vocabulary, or text that is not Unicode.
        UnsupportedFeature: text for an engine without a tokenizer.
    """
    if isinstance(prompt, Mapping):
        given = [name for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        if len(given) != 1 or set(prompt) - {"prompt", "prompt_token_ids"}:
            raise InvalidParameter("prompt", sorted(map(str, prompt)), _ALLOWED)
        inner = prompt[given[0]]
        if isinstance(inner, str) != (given[0] == "prompt"):
            raise InvalidParameter(given[0], inner, "a string" if given[0] == "prompt" else "a list of token ids")
        return to_tokens(inner, tokenizer, vocab_size, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UnsupportedFeature("prompt", "this engine runs without a tokenizer; give prompt_token_ids")
        token_ids = tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        text: str | None = prompt
        if max(token_ids, default=0) >= vocab_size:
            raise InvalidParameter("prompt", max(token_ids), f"text whose token ids lie below {vocab_size}")
    elif isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray):
        token_ids, text = list(prompt), None
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise InvalidParameter("prompt_token_ids", token_id, f"token ids from 0 to {vocab_size - 1}")
    else:
        raise InvalidParameter("prompt", prompt, _ALLOWED)
    if not token_ids:
        raise InvalidParameter("prompt", prompt, "at least one token long")
    return TokenPrompt(token_ids, text)
