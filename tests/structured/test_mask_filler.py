"""Masks and forced tokens of a step are the same from the process of the grammars as from this one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire.errors import WorkerError
from quire.execution.sampling.sampler import Sampler
from quire.memory.results import NO_OPS
from quire.scheduling.plan import ItemResult, NewSequence, ScheduledSequence, StepPlan
from quire.sequences.params import SamplingParams
from quire.sequences.structured import StructuredOutputs
from quire.sequences.thinking import ThinkingTokens
from quire.text.structured.grammar_backend import MAX_LOCAL_VOCAB, GrammarBackend, open_grammars
from quire.text.structured.grammar_process import GrammarProcess
from quire.text.structured.grammar_setup import GrammarModel
from quire.text.structured.local_grammars import LocalGrammars
from quire.text.structured.mask_filler import GrammarStates
from quire.text.structured.state_table import LOST, MaskJob, StepStart
from tests.structured.grammar_world import NUM_IDS, VOCAB, WANTED, constraint_of, fresh, json_call, new_sequence, states

NAMES = sorted(set(WANTED) - {"dead"})
REGEX = StructuredOutputs(**WANTED["regex"]).source
START, STOP = VOCAB.index("q"), VOCAB.index("w")


@pytest.fixture
def process() -> Iterator[GrammarProcess]:
    process = GrammarProcess(GrammarModel(json_call, NUM_IDS, (0,)))
    yield process
    process.close()


def states_of(grammars: GrammarBackend, *, overlaps: bool = True) -> GrammarStates:
    return GrammarStates(
        grammars.mask_source(overlaps=overlaps), grammars.model.vocab_size, grammars.model.end_token_ids
    )


class World:
    """Sequences with a sampler, one step at a time; each token is the likeliest of logits that depend on the step."""

    def __init__(self, grammar_states: GrammarStates, openings: list[NewSequence]) -> None:
        self.sampler = Sampler(torch.device("cpu"), grammar_states)
        self.outputs: list[list[int]] = [[] for _ in openings]
        self.errors: dict[int, str] = {}
        self.items = [ScheduledSequence(seq_id, 0, new.token_ids, (), 1, new) for seq_id, new in enumerate(openings)]
        self.num_steps = 0

    def step(self) -> list[ItemResult]:
        logits = torch.randn(len(self.items), NUM_IDS, generator=torch.Generator().manual_seed(self.num_steps))
        self.sampler.begin_step(StepPlan(self.num_steps, tuple(self.items), NO_OPS, ()))
        results = self.sampler.sample(logits, self.items)
        following = []
        for result in results:
            output = self.outputs[result.seq_id]
            start = 2 + len(output)
            output += result.token_ids
            if result.error is not None:
                self.errors[result.seq_id] = result.error
            elif 0 not in result.token_ids:
                following.append(ScheduledSequence(result.seq_id, start, result.token_ids, (), 1, None))
        self.items = following
        self.num_steps += 1
        return results

    def run(self) -> list[list[int]]:
        while self.items and self.num_steps < 30:
            self.step()
        return self.outputs


def test_masks_do_not_depend_on_where_they_are_filled(process: GrammarProcess) -> None:
    openings = [new_sequence(name, temperature=0.0) for name in NAMES]
    both = (process, LocalGrammars(GrammarModel(json_call, NUM_IDS, (0,))))
    worlds = [World(states_of(one, overlaps=overlaps), openings) for one in both for overlaps in (True, False)]
    here, *others = (world.run() for world in [World(states(), openings), *worlds])
    assert all(outputs == here for outputs in others)
    assert not any(world.errors for world in worlds)
    assert all(len(output) > 3 for output in here)
    for name, output in zip(NAMES, here, strict=True):
        assert fresh(name, [token_id for token_id in output if token_id]).error is None


def thinking(name: str | None, budget: int) -> NewSequence:
    wanted = None if name is None else StructuredOutputs(**WANTED[name])
    tokens = ThinkingTokens(START, (STOP,), (VOCAB.index("v"), STOP))
    params = SamplingParams(
        structured_outputs=wanted, thinking=tokens, thinking_token_budget=budget, temperature=0.0, max_tokens=8
    )
    return new_sequence("choice", prompt=(3, START))._replace(params=params)


def test_a_thinking_budget_without_a_grammar_needs_no_process(process: GrammarProcess) -> None:
    world = World(states_of(process), [thinking(None, 2)])
    for _ in range(4):
        world.step()
    assert world.outputs[0][2:4] == [VOCAB.index("v"), STOP]
    assert process._pipes is None
    both = [thinking(None, 2), thinking("choice", 3), new_sequence("regex", temperature=0.0)]
    assert World(states_of(process), both).run() == World(states(), both).run()


def test_the_end_of_the_process_ends_its_requests_and_no_others(process: GrammarProcess) -> None:
    grammar_states = states_of(process)
    params = SamplingParams(temperature=0.0)
    plain = new_sequence("choice")._replace(params=params)
    world = World(grammar_states, [new_sequence("regex", temperature=0.0), plain, thinking(None, 3)])
    world.step()
    held = process.hold(REGEX, 0)
    assert held.is_held
    running = process.start()
    os.kill(running._process.pid, signal.SIGKILL)
    running._process.wait()
    assert not held.is_held
    world.step()
    assert world.errors == {0: LOST}
    assert len(world.outputs[1]) == len(world.outputs[2]) == 2
    # Those that come later get another process, and sequences of the one that ended are unknown to it.
    process.hold(REGEX, 0)
    later = World(grammar_states, [new_sequence("regex", temperature=0.0)])
    assert later.run() == World(states(), [new_sequence("regex", temperature=0.0)]).run()
    assert not later.errors


def test_no_step_waits_for_a_process_that_it_did_not_ask(process: GrammarProcess) -> None:
    source = process.mask_source(overlaps=True)
    constraint = constraint_of(new_sequence("regex"))
    source.begin(StepStart((), ((0, constraint),), (MaskJob(0, 0, (), (), True),)))
    assert source.masks()[0] == [(2, 1, None)]
    running = process.start()._process
    running.kill()
    running.wait()
    with pytest.raises(WorkerError, match="ended"):
        source.append([(0, (1,))])
    process.hold(REGEX, 0)
    with pytest.raises(WorkerError, match="ended"):
        source.masks()


def test_small_vocabularies_need_no_process() -> None:
    assert isinstance(open_grammars(GrammarModel(json_call, MAX_LOCAL_VOCAB, (0,))), LocalGrammars)
    assert isinstance(open_grammars(GrammarModel(json_call, MAX_LOCAL_VOCAB + 1, (0,))), GrammarProcess)
