"""The text of one sample or beam, token by token, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from quire.sequences.decoding.stop import StopStrings
from quire.sequences.sequence import Request
from quire.text.tokenizers.detokenizer import IncrementalDetokenizer
from quire.text.tokenizers.tokenizer import Tokenizer


class SampleText:
    """The emitted text of one sample; bytes of an incomplete character at its end are held back."""

    __slots__ = ("_detokenizer", "_min_tokens", "_shows_stop", "_stops", "num_output")

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self.num_output = 0
        self._stops = StopStrings(params.stop, is_included=params.include_stop_str_in_output) if params.stop else None
        self._shows_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                kept_special_ids=params.kept_special_ids,
            )

    def take(self, token_ids: Sequence[int], num_output: int, *, is_end_token: bool) -> tuple[str, str | None]:
        """Append tokens; with stop strings, only one token."""
        self.num_output = num_output
        if self._detokenizer is None:
            return "", None
        text = self._detokenizer.push(token_ids[:-1] if is_end_token and not self._shows_stop else token_ids)
        if self._stops is None:
            return text, None
        return self._stops.push(text, can_stop=num_output > self._min_tokens)

    def flush(self) -> str:
        """Return the text that is still held back, after an end without a stop string."""
        return "" if self._stops is None else self._stops.flush()

    def fork(self) -> SampleText:
        """Return an independent copy."""
        copy = SampleText.__new__(SampleText)
        copy._stops = None if self._stops is None else self._stops.fork()
        copy._shows_stop = self._shows_stop
        copy._min_tokens = self._min_tokens
        copy.num_output = self.num_output
        copy._detokenizer = None if self._detokenizer is None else self._detokenizer.fork()
        return copy
