"""Triton's choice of tokens, interpreted or on a GPU, against stock operators: tokens, and states of rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.execution.sampling.device.device_draws import TorchDraws, uniform_numbers
from quire.execution.sampling.device.device_rows import warm_up
from quire.execution.sampling.device.known_rows import know_rows, whole_numbers
from quire.execution.sampling.row_sampling import SamplingState
from quire.execution.sampling.sampler import Sampler
from quire.memory.results import NO_OPS
from quire.ops.interface.token_draws import FINE, RowParameters
from quire.scheduling.plan import NewSequence, ScheduledSequence, StepPlan
from quire.sequences.params import SamplingParams
from tests.ops.triton.device import DEVICE, MARKS, make_ops

from quire.ops.triton.sampling import scale_of  # isort: skip - the module above skips where Triton is missing

pytestmark = MARKS

PLACE = torch.device(DEVICE)
INF, NAN = float("inf"), float("nan")
# A weight of the kernels and one of the twin differ by this share at most, and so do their sums.
ROUNDING = 1e-6
TEMPERATURES = (1e-40, 1e-6, 0.3, 1.0, 1.7, 100.0)
KINDS: dict[str, dict[str, Sequence[Any]]] = {
    "greedy": {"temperature": (0.0,)},
    "whole": {"temperature": TEMPERATURES},
    "few": {
        "temperature": TEMPERATURES,
        "top_k": (1, 2, 5, 20, 255, 256),
        "top_p": (1e-9, 0.3, 0.95, 1.0),
        "min_p": (0.0, 0.0, 0.1, 1.0),
    },
    "many": {
        "temperature": TEMPERATURES,
        "top_k": (0, 0, 300, 700, 10**6),
        "top_p": (1e-9, 0.3, 0.95, 0.9999, 1.0),
        "min_p": (0.0, 0.0, 1e-3, 0.1, 1.0),
    },
}


def random_states(rng: random.Random, count: int, kinds: Sequence[str]) -> list[SamplingState]:
    states = []
    for _ in range(count):
        options = {name: rng.choice(values) for name, values in KINDS[rng.choice(kinds)].items()}
        new = NewSequence(SamplingParams(**options), rng.randrange(-(2**63), 2**63), rng.randrange(4), 1, (1,), ())
        states.append(SamplingState(new, PLACE))
    return states


def parameters_of(states: Sequence[SamplingState], vocab_size: int) -> RowParameters:
    parameters = know_rows(states, vocab_size, PLACE).parameters
    assert parameters is not None
    return parameters


def reached_in_order(logits: Tensor, parameters: RowParameters, row: int, token: int) -> tuple[float, float, float]:
    """Return the row's number, and the shares of what may be drawn before and up to a token, by float64.

    Also the distance of the nucleus from where it could be cut otherwise is taken up: its two candidates' edges.
    """
    filters = parameters.filters
    own = logits[row].cpu()
    cooled = (own - own.max()) / float(filters.temperature[row])
    is_whole = parameters.whole is not None and row in parameters.whole.tolist()
    ids = torch.arange(len(cooled)) if is_whole else cooled.sort(descending=True, stable=True)[1]
    weights = cooled[ids].double().exp()
    top_p = 1.0
    if not is_whole:
        weights[int(filters.top_k[row]) :] = 0.0
        weights[weights < float(filters.min_p[row]) * (1 - ROUNDING)] = 0.0
        top_p = float(filters.top_p[row])
    reached = weights.cumsum(0)
    last = int(torch.searchsorted(reached, top_p * reached[-1] * (1 - ROUNDING)))
    total = reached[min(last, len(reached) - 1)]
    place = int((ids == token).nonzero()[0, 0])
    assert weights[place] > 0
    return float(reached[place] - weights[place]), float(reached[place]), float(total)


def check(logits: Tensor, parameters: RowParameters, positions: Tensor, before: Tensor | None = None) -> Tensor:
    """Compare all rows; a token may differ where its point is within rounding of the token's edge. Return the tokens.

    At most a tenth of the rows may: what is always within rounding is not compared.
    """
    expected = TorchDraws().draw_tokens(logits.clone(), parameters, positions, before)
    found = make_ops().draw_tokens(logits.clone(), parameters, positions, before)
    assert torch.equal(found[1], expected[1])
    assert ((found[0] >= 0) & (found[0] < logits.shape[1])).all()
    numbers = uniform_numbers(parameters.seeds, parameters.sample_idxs, positions)
    different = [row for row in range(len(logits)) if found[1, row] == FINE and found[0, row] != expected[0, row]]
    assert len(different) <= len(logits) // 10
    for row in different:
        low, high, total = reached_in_order(logits, parameters, row, int(found[0, row]))
        target, slack = float(numbers[row]) * total, 4 * ROUNDING * total
        assert low - slack <= target <= high + slack, (row, low, target, high)
    return found


LOGITS = {
    "spread": lambda rng, rows, width: torch.randn(rows, width, generator=rng) * 3,
    "ties": lambda rng, rows, width: (torch.randn(rows, width, generator=rng) * 4).round() / 4,
    "equal": lambda _, rows, width: torch.full((rows, width), -3.25),
    "one huge": lambda rng, rows, width: torch.randn(rows, width, generator=rng).index_fill_(
        1, torch.tensor([width // 2]), 3e38
    ),
    "some forbidden": lambda rng, rows, width: torch.randn(rows, width, generator=rng).masked_fill_(
        torch.rand(rows, width, generator=rng) < 0.7, -INF
    ).index_fill_(1, torch.tensor([width - 1]), 0.5),
}  # fmt: skip


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 7), (20, 7), (3, 129), (16, 1024), (4, 5003)])
def test_tokens_are_those_of_stock_operators(num_rows: int, vocab_size: int, logits: str) -> None:
    rng = random.Random(f"{num_rows} {vocab_size} {logits}")
    values = LOGITS[logits](torch.Generator().manual_seed(num_rows), num_rows, vocab_size).to(PLACE)  # type: ignore[no-untyped-call]
    positions = whole_numbers([rng.randrange(2**31) for _ in range(num_rows)], PLACE)
    states = random_states(rng, num_rows - 1, list(KINDS)) + random_states(rng, 1, ["whole", "few", "many"])
    check(values, parameters_of(states, vocab_size), positions)
    expected = TorchDraws().draw_tokens(values.clone(), None, None, None)
    assert torch.equal(make_ops().draw_tokens(values, None, None, None), expected)


@pytest.mark.parametrize("kind", ["whole", "few", "many"])
def test_each_kind(kind: str) -> None:
    rng = random.Random(kind)
    values = LOGITS["ties"](torch.Generator().manual_seed(2), 6, 2000).to(PLACE)  # type: ignore[no-untyped-call]
    check(values, parameters_of(random_states(rng, 6, [kind]), 2000), whole_numbers(range(6), PLACE))


def test_many_rows() -> None:
    rng = random.Random(4)
    values = torch.randn(300, 300, generator=torch.Generator().manual_seed(4)).to(PLACE)
    positions = whole_numbers([rng.randrange(2**31) for _ in range(300)], PLACE)
    check(values, parameters_of(random_states(rng, 300, ["greedy", "whole"]), 300), positions)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("logits", ["spread", "equal"])
def test_a_real_vocabulary(kind: str, logits: str) -> None:
    rng = random.Random(kind)
    values = LOGITS[logits](torch.Generator().manual_seed(1), 1, 151_936).to(PLACE)  # type: ignore[no-untyped-call]
    if kind == "greedy":
        assert make_ops().draw_tokens(values, None, None, None).tolist() == [[int(values.argmax())], [FINE]]
        return
    for _ in range(1 if logits == "equal" else 2):
        check(values, parameters_of(random_states(rng, 1, [kind]), 151_936), whole_numbers([rng.randrange(99)], PLACE))


@pytest.mark.parametrize("checked", [False, True])
def test_wrong_rows_harm_no_others(checked: bool) -> None:
    rng = random.Random(7)
    generator = torch.Generator().manual_seed(7)
    raw = (torch.randn(40, 300, generator=generator) * 2).to(PLACE)
    wrong: dict[int, tuple[Any, float]] = {
        1: (5, NAN), 4: (slice(None), NAN), 6: (299, INF), 9: (slice(None), -INF), 11: (0, NAN), 20: (slice(0, 2), INF),
        23: (slice(None), -INF), 39: (7, NAN),
    }  # fmt: skip
    for row, (columns, value) in wrong.items():
        raw[row, columns] = value
    parameters = parameters_of(random_states(rng, 40, list(KINDS)), 300)
    positions = whole_numbers([rng.randrange(2**31) for _ in range(40)], PLACE)
    before = None
    if checked:
        before = make_ops().check_logits(raw.clone())
        assert torch.equal(before, TorchDraws().check_logits(raw.clone()))
        raw[12] = -INF
        raw[13, 4] = INF
    found = check(raw, parameters, positions, before)
    assert set((found[1] != FINE).nonzero()[:, 0].tolist()) == set(wrong) | ({12, 13} if checked else set())
    plain = make_ops().draw_tokens(raw, None, None, before)
    assert torch.equal(plain[1], found[1])


def test_a_token_does_not_depend_on_other_rows() -> None:
    rng = random.Random(11)
    values = (torch.randn(12, 3000, generator=torch.Generator().manual_seed(11)) * 8).round().to(PLACE) / 8
    states = random_states(rng, 12, list(KINDS))
    positions = whole_numbers(range(12), PLACE)
    found = make_ops().draw_tokens(values, parameters_of(states, 3000), positions, None)
    for row, state in enumerate(states):
        if state.params.is_greedy:
            continue
        alone = make_ops().draw_tokens(
            values[row : row + 1], parameters_of([state], 3000), positions[row : row + 1], None
        )
        assert alone[0].item() == found[0, row].item()


def test_rows_that_list_more_tokens_than_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.ops.triton.sampling.LISTED", 16)
    rng = random.Random(13)
    values = (torch.randn(8, 2000, generator=torch.Generator().manual_seed(13)) * 2).round().to(PLACE)
    check(values, parameters_of(random_states(rng, 8, ["many"]), 2000), whole_numbers(range(8), PLACE))


def test_sums_of_weights_fit() -> None:
    for vocab_size in (7, 2**17, 2**18, 2**18 + 1, 2**20):
        assert scale_of(vocab_size) * vocab_size <= 2**62


@pytest.mark.parametrize("vocab_size", [7, 3000])
def test_all_kinds_can_be_chosen_when_an_engine_starts(vocab_size: int) -> None:
    """With the kernels, and with stock operators, which need no compiling."""
    for draws in (make_ops(), TorchDraws()):
        warm_up(draws, vocab_size, PLACE)


def test_a_sampler_with_kernels_gives_the_results_of_one_with_stock_operators() -> None:
    """Log probabilities, penalties and errors go through it as well, and rows that the host draws are beside others."""
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "logprobs": 2},
        {"top_k": 20, "frequency_penalty": 0.5},
        {"top_p": 0.9, "repetition_penalty": 1.3, "logprobs": 0},
        {"min_p": 0.05},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"typical_p": 0.7},
        {"temperature": 1.2},
    ]
    items = tuple(
        ScheduledSequence(
            idx, 0, (1, 2, 3), (), 1, NewSequence(SamplingParams(**each), idx, 0, 2, (1, 2, 3), ())
        )
        for idx, each in enumerate(options)
    )  # fmt: skip
    generator = torch.Generator().manual_seed(17)
    samplers = [Sampler(PLACE, draws=TorchDraws()), Sampler(PLACE, draws=make_ops())]
    for step in range(3):
        logits = torch.randn(len(items), 500, generator=generator).to(PLACE) * 2
        logits[7, 3] = NAN
        results = []
        for sampler in samplers:
            sampler.begin_step(StepPlan(step, items, NO_OPS, ()))
            results.append(sampler.sample(logits.clone(), items))
        assert results[1] == results[0]
        assert [result.error is not None for result in results[0]] == [False] * 7 + [True]
        tokens = [(result.token_ids or (0,))[:1] for result in results[0]]
        items = tuple(ScheduledSequence(idx, 3 + step, own, (), 1, None) for idx, own in enumerate(tokens))
