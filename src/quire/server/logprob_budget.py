"""How many log probabilities one answer may hold, and all answers together that are not sent yet."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import InvalidParameter
from quire.sequences.params import SamplingParams
from quire.server.errors import ApiError

# Of the largest answers, whose readers may take nothing for as long as `send_timeout_s`.
MAX_LARGE_ANSWERS = 16


class LogprobBudget:
    """Counts log probabilities, each about 13 bytes, from when a request begins until its answer is sent.

    Args:
        per_answer: that one answer may hold.
    """

    def __init__(self, per_answer: int) -> None:
        self.per_answer = per_answer
        self._left = MAX_LARGE_ANSWERS * per_answer

    def reserve(
        self, params: SamplingParams, lengths: Sequence[int], max_model_len: int, num_prompt_copies: int
    ) -> Held:
        """Hold what an answer may need, if no output ends early.

        Args:
            params: of all prompts.
            lengths: tokens of each prompt.
            max_model_len: tokens of a prompt and an output at most.
            num_prompt_copies: how often the answer has the log probabilities of a prompt.

        Raises:
            InvalidParameter: one answer may not hold so many.
            ApiError: 429, others hold too many.
        """
        counts = {"prompt_logprobs": 0, "logprobs": 0}
        if params.prompt_logprobs is not None:
            counts["prompt_logprobs"] = num_prompt_copies * (1 + params.prompt_logprobs) * sum(lengths)
        if params.logprobs is not None:
            longest = max_model_len if params.max_tokens is None else params.max_tokens
            num_output = sum(min(longest, max(max_model_len - length, 0)) for length in lengths)
            counts["logprobs"] = params.num_sequences * (1 + params.logprobs) * num_output
        total = sum(counts.values())
        if total > self.per_answer:
            field = max(counts, key=counts.__getitem__)
            allowed = (
                f"such that an answer holds at most {self.per_answer:,} log probabilities (here up to {total:,}: "
                "tokens of all prompts and outputs, times one more than this)"
            )
            raise InvalidParameter(field, getattr(params, field), allowed)
        if total > self._left:
            why = "answers that are on their way hold too many log probabilities"
            raise ApiError(429, why, code="too_many_logprobs", headers={"Retry-After": "1"})
        return Held(self, total)


class Held:
    """What one answer has reserved.

    Args:
        budget: of the server.
        count: log probabilities.
    """

    def __init__(self, budget: LogprobBudget, count: int) -> None:
        self._budget = budget
        self._count = count
        budget._left -= count

    def release(self) -> None:
        """Give them back; a second time does nothing."""
        self._budget._left += self._count
        self._count = 0
