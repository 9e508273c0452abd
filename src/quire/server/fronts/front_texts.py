"""The texts of a request's samples, made in a front from their tokens, so that the engine's thread makes none."""

from __future__ import annotations

from collections.abc import Sequence

from quire.engine.outputs.outputs import CompletionOutput
from quire.sequences.params import SamplingParams
from quire.sequences.status import FinishReason
from quire.text.tokenizers.detokenizer import IncrementalDetokenizer
from quire.text.tokenizers.tokenizer import Tokenizer


class FrontTexts:
    """Does what `SampleText` does in the engine, for samples without stop strings."""

    __slots__ = ("_params", "_prompt_ids", "_samples", "_tokenizer")

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        self._samples: dict[int, IncrementalDetokenizer] = {}

    @staticmethod
    def can_make(params: SamplingParams) -> bool:
        """Return whether the texts decide nothing in the engine: no stop string, and no choice among candidates."""
        return params.detokenize and not params.stop and params.beam_width is None and not params.is_ranked

    def push(self, index: int, token_ids: Sequence[int]) -> str:
        """Return the characters that further tokens of a sample complete."""
        sample = self._samples.get(index)
        if sample is None:
            sample = self._samples[index] = IncrementalDetokenizer(
                self._tokenizer,
                self._prompt_ids,
                skip_special_tokens=self._params.skip_special_tokens,
                kept_special_ids=self._params.kept_special_ids,
            )
        return sample.push(token_ids)

    def add_text(self, output: CompletionOutput) -> None:
        """Set the text of a delta of one sample; the token that ended it has a text only where stop strings have."""
        token_ids = output.token_ids
        if output.finish_reason == FinishReason.STOP.value and not self._params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        output.text = self.push(output.index, token_ids)
