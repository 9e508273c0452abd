"""How much time the grammars of requests may take, while all requests of a step wait.

`llguidance` bounds the items that a parser looks at for one mask, but where a text can be read in many ways, each of
them costs as many steps as there are items before it: masks of an ambiguous grammar grow from 0.04 to 160 ms within 200
tokens, for each sample. Masks of other grammars cost about as much as one look at each token of the vocabulary, and to
take a token in costs less. So much is free; what goes beyond it is debt, of the request and of its grammar:

- a mask, or a token: the processor's time less `FREE_S` and V times `FREE_S_PER_TOKEN`; where that is below 0 it pays
  off what the request owes.
- A step pays off `STEP_S` of what the grammar owes.
- Where a grammar owes more than `LIMIT_S`, its requests that owe something end with an error; above twice as much, all
  of them do that want another mask.

So a busy machine ends nobody's request. Requests of one grammar count together, because one body may bring hundreds.
"""

from __future__ import annotations

import time

FREE_S = 100e-6
FREE_S_PER_TOKEN = 10e-9
STEP_S = 0.01
LIMIT_S = 0.03


class GrammarBudget:
    """What all requests of one grammar may take together.

    Args:
        vocab_size: V.

    Attributes:
        free_s: seconds of a mask, or of a token that is taken in, that are no debt.
        debt_s: seconds that its requests owe, less what steps have paid off.
    """

    __slots__ = ("_step", "debt_s", "free_s")

    def __init__(self, vocab_size: int) -> None:
        self.free_s = FREE_S + FREE_S_PER_TOKEN * vocab_size
        self.debt_s = 0.0
        self._step = 0

    def begin_step(self, step: int) -> None:
        """Pay off what the steps since the last one do, each for all requests together.

        Args:
            step: the number of the step that begins.
        """
        self.debt_s = max(0.0, self.debt_s - STEP_S * max(0, step - self._step))
        self._step = step


class GrammarAccount:
    """What the sequences of one request take.

    Args:
        budget: of its grammar.
    """

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
        """Count this thread's time from now on."""
        self._since_s = time.thread_time()

    def charge(self, count: int) -> bool:
        """Charge this thread's time since `start` or the last call; say whether the request may take more.

        Args:
            count: masks that were filled, and tokens that were taken in, meanwhile.
        """
        now_s = time.thread_time()
        before = self._debt_s
        self._debt_s = max(0.0, before + now_s - self._since_s - count * self.budget.free_s)
        self._since_s = now_s
        self.budget.debt_s = max(0.0, self.budget.debt_s + self._debt_s - before)
        return not self.is_overdrawn
