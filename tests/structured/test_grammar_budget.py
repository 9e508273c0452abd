"""The time budget of grammars: free shares, debts, and requests that it ends, on a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire.execution.sampling.sampler import Sampler
from quire.memory.results import NO_OPS
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan
from quire.text.structured import grammar_budget
from quire.text.structured.grammar_budget import LIMIT_S, SPIKE_STEPS, STEP_S, GrammarAccount, GrammarBudget
from quire.text.structured.grammar_setup import CompiledGrammars, GrammarSetup
from quire.text.structured.grammar_state import RUN_PART, TOO_SLOW
from tests.structured.grammar_world import NUM_IDS, constraint_of, json_call, new_sequence, states, tokenizer

CPU = torch.device("cpu")


class Clock:
    """Time of this thread that passes when a matcher computes a mask, or takes a token in.

    Args:
        seconds_of: what a call of a matcher's method takes.
    """

    def __init__(self, seconds_of: Callable[[str], float]) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []
        self.seconds_of = seconds_of

    def thread_time(self) -> float:
        return self.now_s

    def note(self, method: str) -> None:
        self.calls.append(method)
        self.now_s += self.seconds_of(method)


class Matcher:
    """A matcher whose calls take the clock's time."""

    def __init__(self, real: object, clock: Clock) -> None:
        self._real = real
        self._clock = clock

    def deep_copy(self) -> Matcher:
        return Matcher(self._real.deep_copy(), self._clock)  # type: ignore[attr-defined]

    def __getattr__(self, method: str) -> object:
        if method in ("unsafe_compute_mask_ptr", "try_consume_tokens"):
            self._clock.note(method)
        return getattr(self._real, method)


class World:
    """A sampler, and requests that each follow one of the grammars of `grammar_world`.

    Args:
        patch: puts the clock in place of the thread's.
        seconds_of: by the name of a grammar, what calls of its matchers take.
    """

    def __init__(self, patch: pytest.MonkeyPatch, seconds_of: dict[str, Callable[[str], float]]) -> None:
        self.clocks = {name: Clock(seconds) for name, seconds in seconds_of.items()}
        total = SimpleNamespace(thread_time=lambda: sum(clock.now_s for clock in self.clocks.values()))
        patch.setattr(grammar_budget, "time", total)
        grammars = CompiledGrammars(GrammarSetup(json_call(), NUM_IDS, (0,)))
        self.held = []
        for name, clock in self.clocks.items():
            source = constraint_of(self.new_sequence(name)).source
            assert source is not None
            grammar = grammars.find(source)
            grammar._matcher = Matcher(grammar._matcher, clock)
            self.held.append(grammar)
        self.sampler = Sampler(CPU, states(grammars.find))
        self.items: list[ScheduledSequence] = []
        self.errors: dict[int, str] = {}
        self.outputs: dict[int, list[int]] = {}
        self.step_idx = 0

    def new_sequence(self, name: str, seed: int = 0, **params: Any) -> NewSequence:
        return new_sequence(name, temperature=0.0, **params)._replace(seed=seed)

    def add(self, seq_id: int, name: str, **params: Any) -> None:
        new = self.new_sequence(name, seq_id, **params)
        self.items.append(ScheduledSequence(seq_id, 0, new.token_ids, (), 1, new))
        self.outputs[seq_id] = []

    def step(self) -> list[ItemResult]:
        self.sampler.begin_step(StepPlan(self.step_idx, tuple(self.items), NO_OPS, ()))
        generator = torch.Generator().manual_seed(self.step_idx)
        logits = torch.randn(NUM_IDS, generator=generator).repeat(len(self.items), 1)
        results = self.sampler.sample(logits, self.items)
        following = []
        for item, result in zip(self.items, results, strict=True):
            if result.error is not None:
                self.errors[item.seq_id] = result.error
            elif 0 not in result.token_ids:
                start = item.start + len(item.token_ids)
                following.append(ScheduledSequence(item.seq_id, start, result.token_ids, (), 1, None))
            self.outputs[item.seq_id] += result.token_ids
        self.items = following
        self.step_idx += 1
        return results


def masks_cost(seconds: float) -> Callable[[str], float]:
    return lambda method: seconds if method == "unsafe_compute_mask_ptr" else 0.0


def test_what_is_free_is_no_debt() -> None:
    budget = GrammarBudget(150_000)
    assert 1e-3 < budget.free_s < 3e-3
    assert GrammarBudget(2048).free_s < 2e-4


def test_cheap_masks_pay_for_expensive_ones_of_their_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(lambda _: 0.0)
    monkeypatch.setattr(grammar_budget, "time", clock)
    budget = GrammarBudget(1000)
    mine, other = GrammarAccount(budget), GrammarAccount(budget)
    mine.start()
    clock.now_s += 10 * budget.free_s
    assert mine.charge(1)
    assert budget.debt_s == pytest.approx(9 * budget.free_s)
    other.start()
    assert other.charge(100), "what another has left over pays for nobody else"
    assert budget.debt_s == pytest.approx(9 * budget.free_s)
    mine.start()
    assert mine.charge(6)
    assert budget.debt_s == pytest.approx(3 * budget.free_s)
    assert mine.charge(6)
    assert budget.debt_s == 0.0


def test_steps_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(lambda _: 0.0)
    monkeypatch.setattr(grammar_budget, "time", clock)
    budget = GrammarBudget(0)
    account = GrammarAccount(budget)
    account.start()
    clock.now_s += LIMIT_S
    assert account.charge(0)
    clock.now_s += STEP_S / 2
    assert not account.charge(0)
    budget.begin_step(1)
    assert not account.is_overdrawn
    budget.begin_step(1)
    assert budget.debt_s == pytest.approx(LIMIT_S - STEP_S / 2)
    budget.begin_step(100)
    assert budget.debt_s == 0.0


def test_a_spike_is_free_once_in_many_steps_of_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the garbage collector in the middle of a mask ends no request, and slow masks do."""
    clock = Clock(lambda _: 0.0)
    monkeypatch.setattr(grammar_budget, "time", clock)
    budget = GrammarBudget(0)
    one, other = GrammarAccount(budget), GrammarAccount(budget)
    one.start()
    clock.now_s += 100 * LIMIT_S
    assert one.charge(1)
    assert budget.debt_s == 0.0
    other.start()
    clock.now_s += 3 * LIMIT_S
    assert not other.charge(1), "another request of the grammar has no spike of its own"
    budget.begin_step(SPIKE_STEPS - 1)
    assert budget.debt_s == 0.0
    one.start()
    clock.now_s += 2 * LIMIT_S
    assert not one.charge(1)
    budget.begin_step(2 * SPIKE_STEPS)
    other.start()
    clock.now_s += 2 * LIMIT_S
    assert other.charge(1)


def test_masks_that_take_too_long_end_their_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"regex": masks_cost(STEP_S * 1.5), "compact": masks_cost(1e-6)})
    for seq_id in range(4):
        world.add(seq_id, "regex" if seq_id % 2 else "compact")
    alone = World(monkeypatch, {"compact": masks_cost(0.0)})
    alone.add(0, "compact")
    while alone.items:
        alone.step()
    monkeypatch.setattr(grammar_budget, "time", world.clocks["regex"])
    while world.items:
        world.step()
    assert world.errors == {1: TOO_SLOW, 3: TOO_SLOW}
    assert world.outputs[0] == world.outputs[2] == alone.outputs[0]
    # Two limits and the mask that went over it.
    assert world.clocks["regex"].now_s <= 2 * LIMIT_S + world.step_idx * STEP_S + STEP_S * 1.5


def test_many_requests_of_one_grammar_share_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"regex": masks_cost(0.01)})
    for seq_id in range(200):
        world.add(seq_id, "regex")
    world.step()
    assert world.clocks["regex"].calls.count("unsafe_compute_mask_ptr") == 2 * LIMIT_S / 0.01 + 1
    # Those that had their masks in time have a token; they owe something, and so they end in the next step.
    world.step()
    assert world.clocks["regex"].calls.count("unsafe_compute_mask_ptr") <= 2 * LIMIT_S / 0.01 + 2
    assert set(world.errors.values()) == {TOO_SLOW}
    assert len(world.errors) >= 199


def test_forced_tokens_that_take_too_long_end_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"compact": lambda method: 0.01 if method == "try_consume_tokens" else 0.0})
    world.add(0, "compact")
    while world.items:
        world.step()
    assert world.errors == {0: TOO_SLOW}
    assert world.clocks["compact"].calls.count("try_consume_tokens") <= LIMIT_S / 0.01 + world.step_idx + RUN_PART


def test_replaying_an_output_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, {"regex": lambda _: 50e-6})
    output = tuple(tokenizer().encode("ab" * 4).ids)
    new = world.new_sequence("regex")._replace(token_ids=(3, 4, *output))
    world.items = [ScheduledSequence(0, 0, new.token_ids, (), 1, new)]
    world.outputs[0] = []
    world.step()
    assert world.held[0].budget.debt_s == 0.0
    assert not world.errors
