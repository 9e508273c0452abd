"""The response fields for log probabilities, in the forms of completions and chat.

A token need not be a whole character. Arrays are `JsonArray`, whose items are made while the answer is written.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, TypedDict

from quire.engine.outputs.logprobs import FlatLogprobs, PromptLogprobs
from quire.sequences.logprobs import TokenLogprobs
from quire.server.http.json_stream import JsonArray
from quire.text.tokenizers.tokenizer import Tokenizer

# JSON has no minus infinity.
LOWEST_LOGPROB = -9999.0


class CompletionLogprobs(TypedDict):
    """The four parallel arrays of `/v1/completions`."""

    tokens: JsonArray
    token_logprobs: JsonArray
    top_logprobs: JsonArray
    text_offset: JsonArray


class TokenNames:
    """Readable names of tokens."""

    def __init__(self, tokenizer: Tokenizer | None, *, by_id: bool, bytes_prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id or tokenizer is None
        self._bytes_prefix = bytes_prefix

    def bytes(self, token_id: int) -> bytes | None:
        """Return a token's bytes, None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        """Return a token's text, or its escaped bytes if they are not whole characters."""
        piece = self.bytes(token_id)
        if self._by_id or piece is None:
            return f"token_id:{token_id}"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return self._bytes_prefix + "".join(f"\\x{byte:02x}" for byte in piece)


class TextOffsets:
    """Tracks the start of each token in the answer's text, in characters.

    A token that begins inside a character has that character's offset. A token that the text leaves out (a skipped
    special token) has the offset of the next one.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._num_chars = 0
        self._begins_text = True

    def over_prompt(self, token_ids: Sequence[int], text: str) -> Iterator[int]:
        """Yield the offsets of the prompt's tokens in its text, which may differ from the tokens by normalization."""
        pending = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in token_ids:
            piece = self._piece(token_id)
            is_special = self._tokenizer is not None and token_id in self._tokenizer.special_ids
            if is_special and not text.startswith(piece.decode("utf-8", "replace"), self._num_chars):
                piece = b""
            yield min(self._step(piece), len(text))
            pending.decode(piece)
        # A character that begins in the prompt and ends in the output is in the output's text.
        self._num_chars = len(text) + bool(pending.getstate()[0])

    def over_output(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> Iterator[int]:
        """Yield the offsets of the next output tokens."""
        self._begins_text = False
        for token_id in token_ids:
            tokenizer = self._tokenizer
            shown = tokenizer is not None and tokenizer.is_visible(token_id, skip_special_tokens=skip_special_tokens)
            yield self._step(self._piece(token_id) if shown else b"")

    def _piece(self, token_id: int) -> bytes:
        if self._tokenizer is None:
            return b""
        return self._tokenizer.head_bytes(token_id) if self._begins_text else self._tokenizer.token_bytes(token_id)

    def _step(self, piece: bytes) -> int:
        begins_inside = bool(piece) and _continues(piece[0]) and self._num_chars > 0
        offset = self._num_chars - begins_inside
        self._num_chars += sum(not _continues(byte) for byte in piece)
        self._begins_text = self._begins_text and not piece
        return offset


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[FlatLogprobs | PromptLogprobs],
    offsets: Iterable[int],
    num_top: int,
    names: TokenNames,
) -> CompletionLogprobs:
    """Return the parallel arrays of `/v1/completions`."""

    def measured() -> Iterator[TokenLogprobs | None]:
        return chain.from_iterable(part.measured() for part in positions)

    return CompletionLogprobs(
        tokens=JsonArray(map(names.name, token_ids)),
        token_logprobs=JsonArray(None if entry is None else clamp(entry.logprob) for entry in measured()),
        top_logprobs=JsonArray(None if entry is None else _top_by_name(entry, num_top, names) for entry in measured()),
        text_offset=JsonArray(offsets),
    )


def chat_logprobs(positions: FlatLogprobs, num_top: int, names: TokenNames) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""

    def entries() -> Iterator[dict[str, Any]]:
        for position in positions.measured():
            entry = _chat_entry(position.token_id, position.logprob, names)
            entry["top_logprobs"] = [
                _chat_entry(token_id, logprob, names) for _, token_id, logprob in _likeliest(position, num_top)
            ]
            yield entry

    return {"content": JsonArray(entries()), "refusal": None}


def prompt_logprobs_json(positions: PromptLogprobs | None, num_top: int, names: TokenNames) -> JsonArray:
    """Return vLLM's `prompt_logprobs`: a map by token id for each prompt token, None for the first one."""

    def row(position: TokenLogprobs) -> dict[str, dict[str, Any]]:
        prompt_token = position.rank, position.token_id, position.logprob
        return {
            str(token_id): {"logprob": clamp(logprob), "rank": rank, "decoded_token": names.name(token_id)}
            for rank, token_id, logprob in (prompt_token, *_likeliest(position, num_top))
        }

    measured = () if positions is None else positions.measured()
    return JsonArray(None if position is None else row(position) for position in measured)


def clamp(logprob: float) -> float:
    """Return the log probability, limited to values that JSON can represent."""
    return max(logprob, LOWEST_LOGPROB)


def _top_by_name(position: TokenLogprobs, num_top: int, names: TokenNames) -> dict[str, float]:
    top = {names.name(position.token_id): clamp(position.logprob)}
    for _, token_id, logprob in _likeliest(position, num_top):
        # Two tokens may have the same text: the chosen one takes precedence, then the likelier one.
        top.setdefault(names.name(token_id), clamp(logprob))
    return top


def _likeliest(position: TokenLogprobs, count: int) -> list[tuple[int, int, float]]:
    """Return rank, token and log probability of the most likely tokens; the chosen token precedes equal ones."""
    others = [(rank, *entry) for rank, entry in enumerate(position.top, 1) if entry[0] != position.token_id]
    if position.rank <= count:
        others.insert(position.rank - 1, (position.rank, position.token_id, position.logprob))
    return others[:count]


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    piece = names.bytes(token_id)
    return {"token": names.name(token_id), "logprob": clamp(logprob), "bytes": None if piece is None else list(piece)}


def _continues(byte: int) -> bool:
    """Return whether a byte is a continuation byte of UTF-8."""
    return byte & 0xC0 == 0x80
