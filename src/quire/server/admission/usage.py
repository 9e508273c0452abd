"""Counts the tokens of an answer."""

from __future__ import annotations

import time
from functools import reduce
from typing import Any

from quire.engine.outputs.outputs import RequestOutput
from quire.memory.results import NO_TOKENS, TokenAccount
from quire.sequences.thinking import ThinkingState, ThinkingTokens


class TokenCount:
    """Tokens of one HTTP request: each prompt once, for any `n`, and the outputs of all samples."""

    def __init__(
        self, *, is_prompt_only: bool = False, is_ranked: bool = False, thinking: ThinkingTokens | None = None
    ) -> None:
        self._is_prompt_only = is_prompt_only
        self._is_ranked = is_ranked
        self._prompts: dict[int, tuple[int, int]] = {}
        self._accounts: dict[int, TokenAccount] = {}
        # Numbers of verified and of accepted draft tokens, by prompt and sample.
        self._drafts: dict[tuple[int, int], tuple[int, int]] = {}
        self._thinking = thinking
        self._states: dict[tuple[int, int], ThinkingState] = {}
        self.num_output = 0
        self.num_pruned = 0
        # Finish reasons of the samples of all prompts, in the order of their ends.
        self.finish_reasons: list[str] = []
        # Times of the request, and of its first and last outputs, in nanoseconds of the monotonic clock.
        self.begin_ns = self.first_ns = self.last_ns = time.monotonic_ns()

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the prompts that have outputs."""
        return sum(num_tokens for num_tokens, _ in self._prompts.values())

    @property
    def num_cached(self) -> int:
        """Number of tokens of these prompts that were found in the prefix cache."""
        return sum(num_cached for _, num_cached in self._prompts.values())

    @property
    def num_reasoning(self) -> int:
        """Number of tokens of reasoning among the outputs."""
        return sum(state.num_tokens for state in self._states.values())

    def add(self, prompt_idx: int, delta: RequestOutput) -> None:
        """Count the tokens of a delta of one prompt."""
        self.last_ns = time.monotonic_ns()
        if not self._prompts:
            first_s = delta.metrics.first_token_s
            # The first delta of an answer in one piece has more than the first token.
            self.first_ns = self.last_ns if first_s is None else min(self.last_ns, round(first_s * 1e9))
        num_prompt = len(delta.prompt_token_ids)
        if num_prompt:
            # At least one token of a prompt is always computed.
            self._prompts[prompt_idx] = (num_prompt, min(delta.num_cached_tokens, num_prompt - 1))
        if delta.prompt_account is not None:
            self._accounts[prompt_idx] = delta.prompt_account
        for output in delta.outputs:
            if output.finish_reason is not None:
                self.finish_reasons.append(output.finish_reason)
            if output.num_draft_tokens:
                self._drafts[prompt_idx, output.index] = output.num_draft_tokens, output.num_accepted_tokens
        if self._thinking is not None:
            self._count_thinking(self._thinking, prompt_idx, delta)
        if not self._is_prompt_only:
            self.num_output += sum(len(output.token_ids) for output in delta.outputs)
        if not self._is_ranked:
            self.num_pruned += delta.num_pruned_tokens
        elif not self._is_prompt_only:
            self.num_output += delta.num_pruned_tokens

    def _count_thinking(self, thinking: ThinkingTokens, prompt_idx: int, delta: RequestOutput) -> None:
        for output in delta.outputs:
            key = prompt_idx, output.index
            if key not in self._states:
                self._states[key] = thinking.state_after_prompt(delta.prompt_token_ids)
            self._states[key] = thinking.advance_all(self._states[key], output.token_ids)

    def as_json(self) -> dict[str, Any]:
        """Return the counts so far in OpenAI's form, with additional details."""
        num_prompt = self.num_prompt
        account = reduce(TokenAccount.plus, self._accounts.values(), NO_TOKENS)
        details = {"pruned_tokens": self.num_pruned} if self.num_pruned else {}
        if self._thinking is not None:
            details["reasoning_tokens"] = self.num_reasoning
        counts: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": num_prompt + self.num_output,
            **({"completion_tokens_details": details} if details else {}),
            "prompt_tokens_details": {
                "cached_tokens": self.num_cached,
                "by_source": account.sources._asdict(),
                "computed_by_reason": account.by_reason(),
            },
        }
        if self._drafts:
            accepted = sum(num_accepted for _, num_accepted in self._drafts.values())
            counts["completion_tokens_details"] = counts.get("completion_tokens_details", {}) | {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(num for num, _ in self._drafts.values()) - accepted,
            }
        return counts
