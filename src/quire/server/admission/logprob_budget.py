"""Limits on the log probabilities in one answer, and in all unsent answers together."""

from __future__ import annotations

from collections.abc import Sequence

from quire.errors import InvalidParameter
from quire.sequences.params import SamplingParams
from quire.server.requests.errors import ApiError

# Number of unsent answers of the largest size; a client may read nothing for up to `send_timeout_s`.
MAX_LARGE_ANSWERS = 16


class LogprobBudget:
    """Counts log probabilities, each about 13 bytes, from the start of a request until its answer is sent."""

    def __init__(self, per_answer: int) -> None:
        self.per_answer = per_answer
        self._left = MAX_LARGE_ANSWERS * per_answer

    def reserve(
        self, params: SamplingParams, lengths: Sequence[int], max_model_len: int, num_prompt_copies: int
    ) -> LogprobReservation:
        """Reserve the log probabilities that an answer has if no output ends early."""
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
        return LogprobReservation(self, total)


class LogprobReservation:
    """The log probabilities that one answer has reserved."""

    def __init__(self, budget: LogprobBudget, count: int) -> None:
        self._budget = budget
        self._count = count
        budget._left -= count

    def release(self) -> None:
        """Release the reservation; a second call does nothing."""
        self._budget._left += self._count
        self._count = 0
