"""The constraint of one output, for another process: without the prompt and the other parameters."""

from __future__ import annotations

from typing import NamedTuple

from quire.scheduling.plan import NewSequence
from quire.sequences.structured import GrammarSource
from quire.sequences.thinking import ThinkingState, ThinkingTokens


class OutputConstraint(NamedTuple):
    """The constraint of a sequence's output by a grammar, a thinking budget, or both.

    Args:
        source: grammar of the output, or of the answer after thinking; None for any text.
        thinking: markers of thinking; None for a model that does not think.
        max_thinking: maximum number of thinking tokens; None for any number.
        thinking_start: state of thinking at the beginning of the output; None without `thinking`.
        ignores_ends: True if the output continues after an end token.
        first_end: first position, in prompt and output, at which an end token is allowed.
        appends: True if forced tokens are appended without a step.
        num_prompt: number of tokens before the output.
        token_ids: the output so far.
        arrival: number of the sequence's request; None for a sequence without siblings.
    """

    source: GrammarSource | None
    thinking: ThinkingTokens | None
    max_thinking: int | None
    thinking_start: ThinkingState | None
    ignores_ends: bool
    first_end: int
    appends: bool
    num_prompt: int
    token_ids: tuple[int, ...]
    arrival: int | None

    @classmethod
    def of(cls, new_sequence: NewSequence) -> OutputConstraint | None:
        """Return the constraint of a sequence from its description in a plan; None if it has none."""
        params, num_prompt = new_sequence.params, new_sequence.num_prompt
        wanted, thinking = params.structured_outputs, params.thinking
        if wanted is None and params.thinking_token_budget is None:
            return None
        prompt, output = new_sequence.token_ids[:num_prompt], new_sequence.token_ids[num_prompt:]
        # If another parameter may forbid forced tokens, they are sampled; it is an error if no allowed token is left.
        may_be_forbidden = (
            params.allowed_token_ids is not None
            or params.bad_words
            or params.logits_processors
            or (params.min_tokens and params.stop_token_ids)
        )
        return cls(
            source=None if wanted is None else wanted.source,
            thinking=thinking,
            max_thinking=params.thinking_token_budget,
            thinking_start=None if thinking is None else thinking.state_after_prompt(prompt),
            ignores_ends=params.ignore_eos,
            first_end=num_prompt + params.min_tokens,
            appends=not (may_be_forbidden or params.measures_tokens or params.strategy is not None),
            num_prompt=num_prompt,
            token_ids=tuple(output),
            arrival=new_sequence.arrival,
        )
