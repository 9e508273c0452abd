"""The grammar state of one sequence: the tokens that are allowed next, and the tokens that are forced.

If the grammar leaves no choice of text, the only allowed token is the one that the tokenizer chooses for that text
(special tokens are not text). So forced tokens are the same if they are sampled row by row, verified as drafts, or
appended without a step. If the forced text is very long, all tokens that the grammar allows stay allowed until the rest
of the text is shorter.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from quire.text.structured.compiled_grammar import NO_EXTENSION, Grammar, why
from quire.text.structured.grammar_budget import GrammarAccount, GrammarBudget
from quire.text.structured.output_constraint import OutputConstraint
from quire.text.structured.thinking import ThinkingGrammar

# Maximum number of forced tokens that one step appends; the rest is appended in the next steps.
MAX_RUN = 256
DEAD_END = "the output has come to a dead end of its grammar (structured_outputs)"
TOO_SLOW = (
    "the grammar of the output takes too long, as where a text can be read in many ways, and others would wait for it "
    "(structured_outputs)"
)
# Number of forced tokens that are consumed between two checks of the time.
RUN_PART = 8
# Forced tokens, and the number of these before the current position.
Forced = tuple[tuple[int, ...], int]
NOT_FORCED: Forced = ((), 0)


class GrammarState:
    """The matcher of one sequence's output; it advances and rolls back."""

    def __init__(
        self,
        grammar: Grammar | ThinkingGrammar | None,
        constraint: OutputConstraint,
        end_token_ids: tuple[int, ...],
        error: str | None = None,
    ) -> None:
        self.error = error
        self.arrival = constraint.arrival
        self._grammar = grammar
        self._matcher: Any = None if grammar is None else grammar.open()
        self._account = GrammarAccount(GrammarBudget(0) if grammar is None else grammar.budget)
        self.num_prompt = constraint.num_prompt
        self._end_token_ids = end_token_ids
        self._first_end = constraint.first_end
        self._appends = constraint.appends
        self.token_ids: list[int] = []
        self._forced: list[Forced] = [self._find_forced()]

    def fork(self, constraint: OutputConstraint) -> GrammarState:
        """Return a copy of this state for another sequence of the request."""
        child = object.__new__(GrammarState)
        for name, value in self.__dict__.items():
            setattr(child, name, value)
        child._matcher = None if self._matcher is None else self._matcher.deep_copy()
        child.token_ids = self.token_ids.copy()
        child._forced = self._forced.copy()
        child.num_prompt = constraint.num_prompt
        return child

    def is_prefix_of(self, token_ids: list[int]) -> bool:
        """Return whether an output begins with all tokens of this one."""
        prefix = self.token_ids
        prefix_len = len(prefix)
        # The last token is compared first: most beams differ there.
        return (
            prefix_len <= len(token_ids)
            and prefix[-1:] == token_ids[:prefix_len][-1:]
            and prefix == token_ids[:prefix_len]
        )

    # ---- tokens ----

    def sync(self, start: int, token_ids: Sequence[int]) -> None:
        """Roll back and advance so that the output's tokens from `start` on are `token_ids`."""
        if self.error is not None:
            return
        same = start + next(
            (
                idx
                for idx, token_id in enumerate(token_ids)
                if start + idx >= len(self.token_ids) or self.token_ids[start + idx] != token_id
            ),
            len(token_ids),
        )
        new_ids = token_ids[same - start :]
        if not self._roll_back(len(self.token_ids) - same) or not new_ids:
            return
        self._account.start()
        for idx in range(0, len(new_ids), RUN_PART):
            part = new_ids[idx : idx + RUN_PART]
            if self._advance(part) < len(part):
                self.error = DEAD_END
            if not self._charge(len(part)):
                return

    def append(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Consume the sampled tokens, and return them with the forced tokens after them."""
        self._account.start()
        num_taken = self._advance(token_ids)
        if not self._charge(num_taken) or num_taken < len(token_ids) or not self._appends:
            return token_ids  # they end the sequence, or forced tokens are to be sampled
        run = list(token_ids)
        limit = len(run) + MAX_RUN
        while len(run) < limit:
            forced, idx = self._forced[-1]
            part = forced[idx : idx + min(limit - len(run), RUN_PART)]
            num_taken = self._advance(part)
            run += part[:num_taken]
            if num_taken < len(part):
                if part[num_taken] in self._end_token_ids and self.position >= self._first_end:
                    run.append(part[num_taken])
                break
            if not part or not self._charge(num_taken):
                break
        return tuple(run)

    def _charge(self, count: int) -> bool:
        """Charge the time of `count` masks and tokens; return False after an error, such as no time left."""
        if not self._account.charge(count) and self.error is None:
            self.error = TOO_SLOW
        return self.error is None

    @property
    def position(self) -> int:
        """Position of the next token in prompt and output."""
        return self.num_prompt + len(self.token_ids)

    def _advance(self, token_ids: Sequence[int]) -> int:
        """Consume tokens before the first end token or token that the grammar forbids; return the number consumed."""
        for num_taken, token_id in enumerate(token_ids):
            if token_id in self._end_token_ids or self._matcher.try_consume_tokens([token_id]) != 1:
                return num_taken
            forced, idx = self._forced[-1]
            is_on_course = idx + 1 < len(forced) and forced[idx] == token_id
            self.token_ids.append(token_id)
            self._forced.append((forced, idx + 1) if is_on_course else self._find_forced())
        return len(token_ids)

    def _roll_back(self, num_tokens: int) -> bool:
        """Remove the last tokens; return False after an error."""
        if not num_tokens:
            return True
        del self.token_ids[-num_tokens:], self._forced[-num_tokens:]
        if not self._matcher.rollback(num_tokens):
            self.error = f"the grammar of the output cannot go back: {why(self._matcher)}"
        return self.error is None

    def _find_forced(self) -> Forced:
        """Return the tokens that the grammar forces at the current position."""
        if self.error is not None or self._grammar is None:
            return NOT_FORCED
        if self._matcher.is_stopped():
            is_only = len(self._end_token_ids) == 1 and not self._matcher.is_error()
            return (self._end_token_ids, 0) if is_only else NOT_FORCED
        return self._grammar.forced(self._matcher), 0

    # ---- masks ----

    def begin_step(self, step: int) -> None:
        """Pay off the grammar's debt at the start of a step."""
        self._account.budget.begin_step(step)

    def fill(self, masks: Sequence[memoryview], draft: Sequence[int]) -> int:
        """Fill the masks of the next row and of the rows after drafts that the grammar allows; return their number."""
        if self.error is None and self._account.is_overdrawn:
            self.error = TOO_SLOW
        if self.error is not None:
            return 0
        self._account.start()
        num_masks = 0
        if self._fill_row(masks[0]):
            num_masks = 1 + (self._fill_drafts(masks[1:], draft) if draft else 0)
        self._charge(2 * num_masks)  # drafts are consumed between the masks
        return num_masks

    def _fill_drafts(self, masks: Sequence[memoryview], draft: Sequence[int]) -> int:
        """Fill the masks after drafts; ignore errors, since the drafts may not be accepted."""
        # A matcher cannot recover from an error.
        before, num_before = self._matcher.deep_copy(), len(self.token_ids)
        num_masks = 0
        for token_id, row in zip(draft, masks, strict=True):
            if not self._advance((token_id,)) or not self._fill_row(row):
                break
            num_masks += 1
        self._matcher, self.error = before, None
        del self.token_ids[num_before:], self._forced[num_before + 1 :]
        return num_masks

    def _fill_row(self, row: memoryview) -> bool:
        forced, idx = self._forced[-1]
        if forced:
            row[:] = bytes(len(row))
            row[forced[idx] >> 3] = 1 << (forced[idx] & 7)
            return True
        self._matcher.unsafe_compute_mask_ptr(ctypes.addressof(ctypes.c_char.from_buffer(row)), len(row))
        if self._matcher.is_error():
            reason = why(self._matcher)
            self.error = DEAD_END if reason == NO_EXTENSION else f"the grammar of the output failed: {reason}"
            return False
        return True
