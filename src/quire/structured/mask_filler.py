"""The grammar states of all open sequences; their masks are filled while the model runs, or before it.

```
 this thread     open, close, begin |  layers ...  | apply the masks to logits | append forced tokens
 mask thread                        '-> fill ... ->'
```

Where the model's threads occupy all cores, a mask thread would slow one of them, and the others would wait for it at
the end of each kernel: then this thread fills the masks, before the layers. Several mask threads would gain nothing:
matchers of one grammar wait for the lock of its lexer.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from quire.errors import RequestError, describe
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence
from quire.structured.grammar_cache import Grammar, GrammarCache
from quire.structured.grammar_state import GrammarState
from quire.structured.thinking import ThinkingGrammar, bitmask_without


class MaskJob(NamedTuple):
    """The mask work of one sequence in a step.

    Args:
        state: grammar state of the sequence.
        start: index in the output of the first of `token_ids`.
        token_ids: known tokens of the output from `start` on.
        draft: drafted tokens after them.
        is_sampled: True where a token is sampled in this step.
    """

    state: GrammarState
    start: int
    token_ids: Sequence[int]
    draft: Sequence[int]
    is_sampled: bool


class GrammarStates:
    """Opens and closes grammar states, and fills their masks.

    Args:
        cache: the model's grammars.
        uses_thread: True to fill masks in a thread, where the model's threads leave a core free.
    """

    def __init__(self, cache: GrammarCache, *, uses_thread: bool = True) -> None:
        self._cache = cache
        self._uses_thread = uses_thread
        self._num_words = -(-cache.vocab_size // 32)
        self._open: dict[int, GrammarState] = {}
        # Closed by the current plan; its new sequences may be forks of them.
        self._finished: list[GrammarState] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="quire-masks")
        self._job: Future[None] | None = None
        self._num_steps = 0

    @property
    def num_open(self) -> int:
        """Number of open sequences with a grammar."""
        return len(self._open)

    def close(self, seq_id: int) -> None:
        """Close a sequence that the current plan names as finished."""
        known = self._open.pop(seq_id, None)
        if known is not None:
            self._finished.append(known)

    def open(self, seq_id: int, new_sequence: NewSequence) -> GrammarState | None:
        """Return the grammar state of a new sequence; None where it has neither a grammar nor a thinking budget."""
        params = new_sequence.params
        wanted = params.structured_outputs
        if wanted is None and params.thinking_token_budget is None:
            return None
        self._wait()
        # Without a grammar, an output may go on after an end token.
        ends = () if params.ignore_eos else self._cache.end_token_ids
        output = list(new_sequence.token_ids[new_sequence.num_prompt :])
        # A sibling's matcher has consumed these tokens already. Equal parameters, seeds and lengths of prompts make no
        # sibling: the prompt decides whether the output begins inside thinking.
        has_siblings = bool(output) and new_sequence.arrival is not None
        known = (*self._open.values(), *self._finished) if has_siblings else ()
        family = [one for one in known if one.arrival == new_sequence.arrival]
        siblings = [one for one in family if one.error is None and one.is_prefix_of(output)]
        nearest = max(siblings, key=lambda one: len(one.token_ids), default=None)
        if nearest is not None:
            state = nearest.fork(new_sequence)
        else:
            try:
                grammar = None if wanted is None else self._cache.compile(wanted.source)
                state = GrammarState(self._after_thinking(grammar, new_sequence), new_sequence, ends)
            except (RequestError, ValueError) as error:
                state = GrammarState(None, new_sequence, ends, f"the grammar of the output does not compile: {error}")
        self._open[seq_id] = state
        return state

    def _after_thinking(self, grammar: Grammar | None, new_sequence: NewSequence) -> Grammar | ThinkingGrammar | None:
        """Return the grammar that applies from the end of thinking on, where the model thinks."""
        params = new_sequence.params
        if params.thinking is None:
            return grammar
        start = params.thinking.state_after_prompt(new_sequence.token_ids[: new_sequence.num_prompt])
        forbidden = () if grammar is None else self._cache.end_token_ids
        mask = bitmask_without(forbidden, self._cache.vocab_size)
        return ThinkingGrammar(params.thinking, params.thinking_token_budget, start, grammar, mask)

    def begin(self, items: Sequence[ScheduledSequence]) -> None:
        """Fill the masks of a step, or have another thread fill them."""
        self._wait()
        self._num_steps += 1
        self._finished.clear()
        if not self._open:
            return
        mask_jobs = [mask_job for item in items if (mask_job := self._mask_job(item)) is not None]
        if not mask_jobs:
            return
        num_rows = [1 + len(mask_job.draft) if mask_job.is_sampled else 0 for mask_job in mask_jobs]
        masks = torch.split(torch.empty((sum(num_rows), self._num_words), dtype=torch.int32), num_rows)
        for mask_job in mask_jobs:
            mask_job.state.begin_step(self._num_steps)
        # The states must have their masks before the thread fills them.
        begun: Future[None] = Future()
        if self._uses_thread:
            self._job = self._thread.submit(_fill, mask_jobs, begun)
        for mask_job, part in zip(mask_jobs, masks, strict=True):
            mask_job.state.begin(part, self._job)
        begun.set_result(None)
        if not self._uses_thread:
            _fill(mask_jobs, begun)

    def append(self, items: Sequence[ScheduledSequence], results: Sequence[ItemResult]) -> list[ItemResult]:
        """Consume the sampled tokens, and append the tokens that the grammars force after them.

        Args:
            items: sampled items.
            results: one result for each item.
        """
        if not self._open:
            return list(results)
        extended = list(results)
        for idx, (item, result) in enumerate(zip(items, results, strict=True)):
            state = self._open.get(item.seq_id)
            # Each of several samples becomes a sequence with a state of its own.
            if state is not None and result.error is None and item.num_samples == 1:
                try:
                    token_ids = state.append(result.token_ids)
                except Exception as error:
                    extended[idx] = ItemResult(item.seq_id, (), error=_failure(error), is_own_fault=True)
                    continue
                if len(token_ids) > len(result.token_ids):
                    extended[idx] = result._replace(token_ids=token_ids)
        return extended

    def _mask_job(self, item: ScheduledSequence) -> MaskJob | None:
        state = self._open.get(item.seq_id)
        if state is None:
            return None
        is_sampled = item.num_samples > 0
        num_certain = len(item.token_ids) - item.num_draft
        certain, draft = item.token_ids[:num_certain], item.token_ids[num_certain:]
        if item.new_sequence is not None:
            return MaskJob(state, 0, item.new_sequence.token_ids[item.new_sequence.num_prompt :], draft, is_sampled)
        if not is_sampled:
            return None
        num_prompt = state.num_prompt
        start = max(item.start, num_prompt)
        return MaskJob(state, start - num_prompt, certain[start - item.start :], draft, True)

    def _wait(self) -> None:
        """Wait for the mask thread, which may still fill the masks of a failed step."""
        if self._job is not None:
            self._job.result()
            self._job = None


def _failure(error: Exception) -> str:
    """Return the error message for the request of a grammar that raised."""
    return f"the grammar of the output failed: {describe(error)}"


def _fill(mask_jobs: Sequence[MaskJob], begun: Future[None]) -> None:
    """Sync grammar states with the known tokens, and fill their masks."""
    begun.result()
    with torch.inference_mode():
        for mask_job in mask_jobs:
            state = mask_job.state
            # An error ends this sequence's request only.
            try:
                state.sync(mask_job.start, mask_job.token_ids)
                if mask_job.is_sampled:
                    state.fill(mask_job.draft)
            except Exception as error:
                state.error = _failure(error)
