"""Log probabilities in the two forms that clients read, with tokens that need not be whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, TypedDict

from quire.engine.outputs import Logprob, PositionLogprobs
from quire.text.tokenizer import Tokenizer

# JSON has no minus infinity.
LOWEST_LOGPROB = -9999.0


class CompletionLogprobs(TypedDict):
    """The four parallel arrays of `/v1/completions`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TokenNames:
    """Writes token ids for people.

    Args:
        tokenizer: the model's, None where the server runs without one.
        by_id: write every token as "token_id:N".
        bytes_prefix: what stands before the escaped bytes of a token that is not whole characters.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, by_id: bool, bytes_prefix: str = "") -> None:
        self._tokenizer = tokenizer
        self._by_id = by_id or tokenizer is None
        self._bytes_prefix = bytes_prefix

    def bytes(self, token_id: int) -> bytes | None:
        """Return a token's own bytes, None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        """Return a token's text, or its bytes written out where they are not whole characters."""
        piece = self.bytes(token_id)
        if self._by_id or piece is None:
            return f"token_id:{token_id}"
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return self._bytes_prefix + "".join(f"\\x{byte:02x}" for byte in piece)


class TextOffsets:
    """Follows where in the answer's text each token begins, in characters.

    A token that begins inside a character has that character's offset. A token that the text leaves out (a skipped
    special token) has the offset of what comes next.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._num_chars = 0
        self._begins_text = True

    def over_prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the offsets of the prompt's tokens in its text, which the tokens may have normalised."""
        offsets = []
        pending = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in token_ids:
            piece = self._piece(token_id)
            is_special = self._tokenizer is not None and token_id in self._tokenizer.special_ids
            if is_special and not text.startswith(piece.decode("utf-8", "replace"), self._num_chars):
                piece = b""
            offsets.append(min(self._step(piece), len(text)))
            pending.decode(piece)
        # A character that the prompt only begins is in the output's text.
        self._num_chars = len(text) + bool(pending.getstate()[0])
        return offsets

    def over_output(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> list[int]:
        """Return the offsets of the next output tokens."""
        self._begins_text = False
        offsets = []
        for token_id in token_ids:
            tokenizer = self._tokenizer
            shown = tokenizer is not None and tokenizer.is_visible(token_id, skip_special_tokens=skip_special_tokens)
            offsets.append(self._step(self._piece(token_id) if shown else b""))
        return offsets

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
    positions: Sequence[PositionLogprobs | None],
    offsets: Sequence[int],
    num_top: int,
    names: TokenNames,
) -> CompletionLogprobs:
    """Return the parallel arrays of `/v1/completions`.

    Args:
        token_ids: the tokens.
        positions: for each token its log probabilities, None for the first one of a prompt.
        offsets: for each token where it begins in the text.
        num_top: how many of the likeliest tokens; 0 shows the chosen one only.
        names: how tokens are written.
    """
    arrays = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=list(offsets))
    for token_id, position in zip(token_ids, positions, strict=True):
        arrays["tokens"].append(names.name(token_id))
        if position is None:
            arrays["token_logprobs"].append(None)
            arrays["top_logprobs"].append(None)
            continue
        chosen = clamp(position[token_id].logprob)
        top = {names.name(token_id): chosen}
        for other_id, other in _likeliest(position, num_top):
            # Two tokens may have the same text; the chosen one, then the likelier one, has the name.
            top.setdefault(names.name(other_id), clamp(other.logprob))
        arrays["token_logprobs"].append(chosen)
        arrays["top_logprobs"].append(top)
    return arrays


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int, names: TokenNames
) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice.

    Args:
        token_ids: the tokens.
        positions: for each token its log probabilities.
        num_top: entries of `top_logprobs`.
        names: how tokens are written.
    """
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        entry = _chat_entry(token_id, position[token_id], names)
        entry["top_logprobs"] = [
            _chat_entry(other_id, other, names) for other_id, other in _likeliest(position, num_top)
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def prompt_logprobs_json(
    positions: Sequence[PositionLogprobs | None], num_top: int, names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's `prompt_logprobs`: for each prompt token a map of token ids, None for the first one.

    Args:
        positions: for each prompt token its log probabilities.
        num_top: entries beside the prompt's own token.
        names: how tokens are written.
    """
    rows: list[dict[str, dict[str, Any]] | None] = []
    for position in positions:
        if position is None:
            rows.append(None)
            continue
        own = next(iter(position.items()))
        rows.append(
            {
                str(token_id): {
                    "logprob": clamp(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": names.name(token_id),
                }
                for token_id, entry in dict([own, *_likeliest(position, num_top)]).items()
            }
        )
    return rows


def clamp(logprob: float) -> float:
    """Return a log probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


def _likeliest(position: PositionLogprobs, count: int) -> list[tuple[int, Logprob]]:
    ranked = sorted(position.items(), key=lambda item: item[1].rank)
    return [item for item in ranked if item[1].rank <= count][:count]


def _chat_entry(token_id: int, entry: Logprob, names: TokenNames) -> dict[str, Any]:
    piece = names.bytes(token_id)
    return {
        "token": names.name(token_id),
        "logprob": clamp(entry.logprob),
        "bytes": None if piece is None else list(piece),
    }


def _continues(byte: int) -> bool:
    """Tell whether a byte is inside a UTF-8 character, not its first."""
    return byte & 0xC0 == 0x80
