"""Beam search under vLLM's names: `LLM.beam_search(prompts, BeamSearchParams(...))`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from quire.engine.outputs.logprobs import FlatLogprobs
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import RequestFailed
from quire.sequences.params import SamplingParams


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`, with vLLM's names and defaults; `SamplingParams` validates them.

    Args:
        beam_width: number of beams, all of which are returned.
        max_tokens: maximum number of new tokens.
        ignore_eos: search past the model's end-of-sequence tokens.
        temperature: 0 or 1; nothing is drawn.
        length_penalty: scores are divided by the output's length to this power.
        include_stop_str_in_output: keep the text of the end token.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def as_sampling(self) -> SamplingParams:
        """Return the sampling parameters of the search.

        Raises:
            InvalidParameter: a value is not allowed.
        """
        params = SamplingParams(
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
        )
        return replace(params, n=self.beam_width)  # now that the width is checked, which has another name


@dataclass(slots=True)
class BeamSearchSequence:
    """One output of a beam search.

    Args:
        tokens: token ids of prompt and output.
        logprobs: log probabilities of the output's tokens.
        text: text of prompt and output; only of the output if the prompt came as token ids.
        cum_logprob: sum of the log probabilities of the output's tokens.
        finish_reason: "stop" or "length".
        stop_reason: stop token of the request that ended the output; None for the model's own end token.
    """

    tokens: list[int]
    logprobs: FlatLogprobs | None
    text: str
    cum_logprob: float
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The outputs of the search from one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)


def beam_outputs(outputs: Iterable[RequestOutput]) -> list[BeamSearchOutput]:
    """Convert the outputs of `LLM.generate` with a beam width."""
    results = []
    for output in outputs:
        if output.error is not None:
            raise RequestFailed(output.error)
        results.append(
            BeamSearchOutput(
                [
                    BeamSearchSequence(
                        output.prompt_token_ids + beam.token_ids,
                        beam.logprobs,
                        (output.prompt or "") + beam.text,
                        beam.cumulative_logprob or 0.0,
                        beam.finish_reason,
                        beam.stop_reason,
                    )
                    for beam in output.outputs
                ]
            )
        )
    return results
