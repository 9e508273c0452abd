"""Converts the strings of sampling parameters to the tokens that are matched in outputs."""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import InvalidParameter, UnsupportedFeature
from quire.sequences.params import SamplingParams
from quire.text.tokenizers.tokenizer import Tokenizer


class TokenizedParams(NamedTuple):
    """The strings of one request's parameters as tokens; the fields are those of `Request`."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()


def tokenize_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> TokenizedParams:
    """Convert the strings of a request's parameters to tokens.

    A bad word gives two token sequences, without and with a leading space. A breaker gives its last token, when
    tokenized after other text.
    """
    breakers = params.dry_sequence_breakers if params.dry_multiplier else ()
    if tokenizer is None:
        if params.bad_words:
            raise UnsupportedFeature("bad_words", "this engine runs without a tokenizer; use logit_bias")
        if breakers:
            raise UnsupportedFeature("dry_sequence_breakers", "this engine runs without a tokenizer; give none")
        return TokenizedParams()
    bad_words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        within = _encode(tokenizer, "bad_words", word)
        behind_space = _encode(tokenizer, "bad_words", f" {word.lstrip()}")
        for token_ids in (within, behind_space):
            if token_ids and max(token_ids) < vocab_size:
                bad_words[token_ids] = None
    single = {word[0] for word in bad_words if len(word) == 1}
    if params.allowed_token_ids is not None and single.issuperset(params.allowed_token_ids):
        raise InvalidParameter("bad_words", params.bad_words, "such that one of allowed_token_ids is left")
    ends = {_encode(tokenizer, "dry_sequence_breakers", f"a{breaker}")[-1] for breaker in breakers}
    return TokenizedParams(tuple(bad_words), tuple(sorted(ends)))


def _encode(tokenizer: Tokenizer, name: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except InvalidParameter as error:
        raise InvalidParameter(name, error.value, error.allowed) from error
