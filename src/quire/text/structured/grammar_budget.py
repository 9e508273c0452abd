"""Limits of the time that grammars take, for which all requests of a step wait.

`llguidance` bounds the parser items of one mask, but for an ambiguous grammar each item costs a number of steps that
grows with the items before it: masks grow from 0.04 to 160 ms within 200 tokens, for each sample. A mask of another
grammar costs about one look at each token of the vocabulary, and consuming a token costs less. This much time is free;
time beyond it is debt of the request and of its grammar:

- A mask, or a token, adds its processor time less `FREE_S` and V times `FREE_S_PER_TOKEN`; a negative difference pays
  off debt of the request.
- A step pays off `STEP_S` of the grammar's debt.
- If a grammar's debt exceeds `LIMIT_S`, its requests with debt end with an error; above twice the limit, so do all its
  requests that need another mask.

Processor time is measured, so a busy machine ends no request. It includes some interruptions, though: a pass of
Python's garbage collector, or time in which a virtual machine gets no processor. So a single mask or run of tokens that
takes more than the whole limit is free, once in `SPIKE_STEPS` steps of its grammar.

Requests of one grammar count together, because one HTTP body may start hundreds.
"""

from __future__ import annotations

import time

FREE_S = 100e-6
FREE_S_PER_TOKEN = 10e-9
STEP_S = 0.01
LIMIT_S = 0.03
SPIKE_STEPS = 256


class GrammarBudget:
    """The time budget that all requests of one grammar share."""

    __slots__ = ("_spike_step", "_step", "debt_s", "free_s")

    def __init__(self, vocab_size: int) -> None:
        self.free_s = FREE_S + FREE_S_PER_TOKEN * vocab_size
        self.debt_s = 0.0
        self._step = 0
        # Last step in which a spike was free.
        self._spike_step = -SPIKE_STEPS

    def forgives_spike(self) -> bool:
        """Return whether a spike is free now; if so, no other one is free for `SPIKE_STEPS` steps."""
        if self._step - self._spike_step < SPIKE_STEPS:
            return False
        self._spike_step = self._step
        return True

    def begin_step(self, step: int) -> None:
        """Pay off the grammar's debt for the steps since the last call; further calls in one step pay nothing."""
        self.debt_s = max(0.0, self.debt_s - STEP_S * max(0, step - self._step))
        self._step = step


class GrammarAccount:
    """The debt of the sequences of one request."""

    __slots__ = ("_debt_s", "_since_s", "budget")

    def __init__(self, budget: GrammarBudget) -> None:
        self.budget = budget
        self._debt_s = 0.0
        self._since_s = 0.0

    @property
    def is_overdrawn(self) -> bool:
        """True when the request may take no more time."""
        return self.budget.debt_s > (LIMIT_S if self._debt_s else 2 * LIMIT_S)

    def start(self) -> None:
        """Start measuring this thread's processor time."""
        self._since_s = time.thread_time()

    def charge(self, count: int) -> bool:
        """Charge this thread's time since `start` or the last call; return False if the account is overdrawn."""
        now_s, before = time.thread_time(), self._debt_s
        beyond_s = now_s - self._since_s - count * self.budget.free_s
        if beyond_s > LIMIT_S and self.budget.forgives_spike():
            beyond_s = 0.0
        self._debt_s = max(0.0, before + beyond_s)
        self._since_s = now_s
        self.budget.debt_s = max(0.0, self.budget.debt_s + self._debt_s - before)
        return not self.is_overdrawn
