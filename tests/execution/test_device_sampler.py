"""The sampler that waits once a step, against the sampler of the host: the same tokens, measures and errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from quire.execution.capture.tape_capture import WAITING
from quire.execution.device_tokens.deferred_tokens import DeferredTokens
from quire.execution.sampling.device.device_draws import TorchDraws, topk_in_order, uniform_numbers
from quire.execution.sampling.rows import stable_topk
from quire.execution.sampling.sampler import Sampler
from quire.execution.sampling.sampling import uniform
from quire.memory.results import NO_OPS
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan
from quire.sequences.decoding.drafting import UNKNOWN
from quire.sequences.params import SamplingParams

CPU = torch.device("cpu")
VOCAB = 700
CELLS: list[Any] = [0, 5, slice(None)]

# Each with the values that a request may have; the first asks for nothing.
KNOBS: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.0, 0.0, 0.4, 1.9, 1e-40),
    "top_k": (0, 0, 1, 5, 256, 257, 600, 10**6),
    "top_p": (1.0, 1.0, 0.01, 0.5, 0.9, 0.999),
    "min_p": (0.0, 0.0, 0.02, 0.6),
    "repetition_penalty": (1.0, 1.0, 1.0, 0.5, 1.3),
    "frequency_penalty": (0.0, 0.0, 0.0, -1.5, 0.5),
    "presence_penalty": (0.0, 0.0, 0.0, -2.0, 1.5),
    "logprobs": (None, None, None, 0, 3, 20),
    # Only the host has these: their rows are apart.
    "typical_p": (1.0, 1.0, 1.0, 1.0, 1.0, 0.7),
    "dry_multiplier": (0.0, 0.0, 0.0, 0.0, 0.0, 1.0),
    "logit_bias": (None, None, None, None, None, {3: -4.0}),
    "allowed_token_ids": (None, None, None, None, None, [1, 2, 5]),
    "min_tokens": (0, 0, 0, 0, 0, 4),
}


def new_sequence(rng: random.Random, output: int = 0) -> NewSequence:
    params = SamplingParams(**{name: rng.choice(values) for name, values in KNOBS.items()}, max_tokens=50)
    tokens = tuple(rng.randrange(20) for _ in range(rng.randint(1, 6) + output))
    seed = rng.randrange(-(2**63), 2**63)
    return NewSequence(params, seed, rng.randrange(4), len(tokens) - output, tokens, (7, 9))


class History:
    """Sequences that open, go on by the tokens drawn, go back, are preempted, and end.

    Args:
        rng: decides all of that.
        most: number of sequences at most.
        changes: share of the steps in which a sequence is preempted, and in which it goes back.
    """

    def __init__(self, rng: random.Random, most: int, changes: float = 0.1) -> None:
        self._rng, self._most, self._changes, self._tick, self._next = rng, most, changes, 0, 0
        self.tokens: dict[int, list[int]] = {}
        self._openings: dict[int, NewSequence] = {}
        self._finished: list[int] = []

    def plan(self) -> StepPlan:
        rng, items = self._rng, []
        for seq_id in [seq_id for seq_id in self.tokens if rng.random() < 0.1]:
            del self.tokens[seq_id]
            self._finished.append(seq_id)
        while len(self.tokens) < self._most and rng.random() < 0.6:
            self._openings[self._next] = new_sequence(rng, rng.choice([0, 0, 3]))
            self.tokens[self._next] = []
            self._next += 1
        for seq_id, tokens in self.tokens.items():
            if not tokens:
                new = self._openings[seq_id]
                tokens += new.token_ids
                items.append(ScheduledSequence(seq_id, 0, new.token_ids, (), rng.choice([1, 1, 1, 2]), new))
            elif rng.random() < self._changes:  # preempted: what is known comes again
                new = self._openings[seq_id]._replace(token_ids=tuple(tokens))
                items.append(ScheduledSequence(seq_id, 0, new.token_ids, (), 1, new))
            elif rng.random() < 0.9:
                back = 1 + (rng.random() < self._changes and len(tokens) > self._openings[seq_id].num_prompt)
                if back > 1:  # rolled back: another token comes in the place of one
                    tokens[-1] = rng.randrange(20)
                items.append(ScheduledSequence(seq_id, len(tokens) - 1, tuple(tokens[-1:]), (), 1, None))
        rng.shuffle(items)
        self._tick += 1
        plan = StepPlan(self._tick, tuple(items), NO_OPS, tuple(self._finished))
        self._finished = []
        return plan

    def take(self, results: list[ItemResult]) -> None:
        for result in results:
            if result.token_ids:
                self.tokens[result.seq_id].append(result.token_ids[0])

    def end_failed(self, results: list[ItemResult]) -> None:
        for result in results:
            if result.error is not None:
                del self.tokens[result.seq_id]
                self._finished.append(result.seq_id)


class Ahead:
    """A sampler whose steps are launched before the tokens of the step before are read, where all wait for them.

    Attributes:
        num_penalized: tokens with penalties that were drawn behind a token which nobody had read.
    """

    def __init__(self) -> None:
        self._deferred = DeferredTokens(CPU)
        self._sampler = Sampler(CPU, draws=TorchDraws(), deferred=self._deferred)
        self._unread: dict[int, tuple[int, ItemResult]] = {}  # with the positions of the tokens
        self._reads: list[Any] = []
        self.num_penalized = 0

    def step(self, plan: StepPlan, logits: torch.Tensor, expected: list[ItemResult]) -> None:
        waiting = [self._waits(item) for item in plan.items]
        if any(item.seq_id in self._unread and not waits for item, waits in zip(plan.items, waiting, strict=True)):
            self.read()
            waiting = [False] * len(plan.items)
        items = tuple(
            item._replace(token_ids=(UNKNOWN,)) if waits else item
            for item, waits in zip(plan.items, waiting, strict=True)
        )
        self._deferred.begin_step()
        self._sampler.begin_step(plan._replace(items=items))
        found = self._sampler.sample(logits, items) if items else []
        reads, unread = self._deferred.take_reads(), {}
        for item, result, own in zip(items, found, expected, strict=True):
            if result.token_ids or result.error is not None:
                assert result == own
            else:
                unread[item.seq_id] = (item.start + len(item.token_ids), own)
            self.num_penalized += (
                item.token_ids[0] == UNKNOWN and self._sampler.states[item.seq_id].params.penalizes_tokens
            )
        self.read()
        self._reads, self._unread = reads, unread

    def read(self) -> None:
        results = {result.seq_id: result for read in self._reads for result in read()}
        assert results == {seq_id: expected for seq_id, (_, expected) in self._unread.items()}
        self._reads, self._unread = [], {}

    def _waits(self, item: ScheduledSequence) -> bool:
        """Say whether an item has the one token that was drawn for its sequence in the step before."""
        start, expected = self._unread.get(item.seq_id, (-1, None))
        is_next = item.start == start and item.new_sequence is None
        return is_next and expected is not None and tuple(item.token_ids) == expected.token_ids


@pytest.mark.parametrize("seed", range(25))
def test_long_histories_equal_the_host_s(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    history, host, device = History(rng, 9), Sampler(CPU), Sampler(CPU, draws=TorchDraws())
    for _ in range(12):
        plan = history.plan()
        logits = torch.randn(len(plan.items), VOCAB, generator=generator) * rng.choice([0.3, 2.0, 6.0])
        if rng.random() < 0.5:
            logits = (logits * 4).round() / 4  # full of ties
        for row in range(len(logits)):
            if rng.random() < 0.04:
                logits[row][rng.choice(CELLS)] = rng.choice([float("nan"), float("inf"), float("-inf")])
        found = []
        for sampler in (host, device):
            sampler.begin_step(plan)
            found.append(sampler.sample(logits.clone(), plan.items) if plan.items else [])
        assert found[1] == found[0]
        history.take(found[0])
    assert history.tokens or seed


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1)) for seed in range(30)])
def test_long_histories_ahead_of_the_host_equal_the_host_s(seed: int) -> None:
    """The counts of penalties take tokens that the host has not read, and those of sequences that failed are closed."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    history, host, ahead = History(rng, 9, 0.02), Sampler(CPU), Ahead()
    for _ in range(20):
        plan = history.plan()
        logits = torch.randn(len(plan.items), VOCAB, generator=generator) * rng.choice([0.3, 2.0, 6.0])
        for row in range(len(logits)):
            if rng.random() < 0.03:
                logits[row][rng.choice(CELLS)] = rng.choice([float("nan"), float("inf"), float("-inf")])
        host.begin_step(plan)
        expected = host.sample(logits.clone(), plan.items) if plan.items else []
        ahead.step(plan, logits, expected)
        history.take(expected)
        history.end_failed(expected)
    ahead.read()
    assert ahead.num_penalized > 5


def test_the_numbers_of_draws_are_those_of_the_host() -> None:
    rng = random.Random(0)
    rows = [(rng.randrange(-(2**63), 2**63), rng.randrange(2**20), rng.randrange(2**31)) for _ in range(2000)]
    found = uniform_numbers(*torch.tensor(rows).unbind(1))
    assert found.tolist() == [uniform(*row) for row in rows]


@pytest.mark.parametrize("count", [1, 2, 7, 255, 256, 300])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_the_greatest_are_those_of_the_host(count: int, spread: float) -> None:
    logits = (torch.randn(9, 300, generator=torch.Generator().manual_seed(count)) * spread).round()
    expected = stable_topk(logits, count)
    found = topk_in_order(logits, count)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("is_ahead", [False, True])
def test_nothing_is_waited_for_before_the_tokens(is_ahead: bool) -> None:
    """Operators that wait for a value are refused until the one copy at the end; ahead, tokens before are not read."""
    rng, deferred = random.Random(3), DeferredTokens(CPU)
    sampler = Sampler(CPU, draws=TorchDraws(), deferred=deferred if is_ahead else None)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 20},
        {"top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 2},
    ]
    items = [
        ScheduledSequence(
            idx,
            0,
            (1, 2, 3),
            (),
            1,
            new_sequence(rng)._replace(params=SamplingParams(**each), num_prompt=2, token_ids=(1, 2, 3)),
        )
        for idx, each in enumerate(options)
    ]
    sampler.begin_step(StepPlan(0, tuple(items), NO_OPS, ()))
    sampler.sample(torch.randn(4, VOCAB), items)
    decodes = [ScheduledSequence(idx, 3, (UNKNOWN if is_ahead else 5,), (), 1, None) for idx in range(4)]
    deferred.begin_step()
    sampler.begin_step(StepPlan(1, tuple(decodes), NO_OPS, ()))
    names: list[str] = []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Names():  # type: ignore[no-untyped-call]
        results = sampler.sample(torch.randn(4, VOCAB), decodes)
    if is_ahead:
        results = [result for read in deferred.take_reads() for result in read()]
    assert all(result.token_ids for result in results)
    assert names
    assert not set(names) & WAITING
