"""The number of drafts: as many as pay."""

from __future__ import annotations

import random
from collections.abc import Sequence as Tokens
from math import inf

import pytest

from quire.sequences.decoding.lookup import PromptLookup
from quire.sequences.decoding.speculation import LONGEST_PAUSE, MARGIN, AdaptiveDrafter, best_depth
from quire.sequences.sequence import Sequence
from tests.decoding.sequences import sequence_of


class Always:
    """Guesses as many tokens as it may."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self.noted: list[tuple[int, int]] = []
        self.num_resets = 0

    def propose(self, sequence: Sequence, limit: int) -> Tokens[int]:  # noqa: ARG002
        return (1,) * limit

    def record(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:  # noqa: ARG002
        self.noted.append((num_drafted, num_accepted))

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.seq_id)

    def reset(self) -> None:
        self.num_resets += 1


def serve(speculation: AdaptiveDrafter, share: float, num_tokens: int, seed: int = 0) -> tuple[float, int]:
    """Serve a sequence whose drafts are right so often.

    Returns:
        What its steps took, at the costs that the speculation believes in, and how many drafts the last one had.
    """
    rng, sequence = random.Random(seed), sequence_of(seed, [1], [2])
    took, num_made, draft = 0.0, 0, 0
    while num_made < num_tokens:
        draft = len(speculation.propose(sequence, 8))
        num_right = next((place for place in range(draft) if rng.random() >= share), draft)
        sequence.tokens += [2] * (num_right + 1)
        if draft:
            speculation.record(sequence, draft, num_right)
        took += speculation.step_costs[draft]
        num_made += num_right + 1
    speculation.forget(sequence)
    return took, draft


def costly(row_cost: float) -> AdaptiveDrafter:
    speculation = AdaptiveDrafter(Always(), 8)
    speculation.step_costs = [1.0 + row_cost * k for k in range(9)]
    return speculation


@pytest.mark.parametrize("row_cost", [0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_drafts_that_are_never_right_cost_next_to_nothing(row_cost: float, share: float) -> None:
    speculation = costly(row_cost)
    for seed in range(5):
        took, _ = serve(speculation, share, 600, seed)
        assert took < 1.05 * 600
    took, _ = serve(speculation, share, 5000, 6)
    assert took < 1.02 * 5000


@pytest.mark.parametrize(("row_cost", "least"), [(0.02, 4.0), (0.1, 3.2), (0.3, 2.0)])
def test_drafts_that_are_mostly_right_pay(row_cost: float, least: float) -> None:
    took, _ = serve(costly(row_cost), 0.95, 600)
    assert 600 / took > least


def test_depth_follows_what_pays() -> None:
    assert serve(costly(0.05), 1.0, 300)[1] == 8
    costs = [1.0 + 0.1 * k for k in range(9)]
    depths = [best_depth(share / 20, costs) for share in range(21)]
    assert depths == sorted(depths)
    assert (depths[0], depths[2], depths[-1]) == (0, 0, 8)
    assert best_depth(1.0, [1.0, 2.0, 3.0]) == 0, "a row that costs a step gains nothing"
    assert best_depth(1.0, [1.0, 2.0, 2.5]) == 2, "what pays may lie behind what does not"
    assert best_depth(0.5, [1.0, 1.5 / MARGIN]) == 0


def test_a_text_that_changes_is_tried_again() -> None:
    speculation, sequence = costly(0.1), sequence_of(0, [1], [2])
    for _ in range(2000):
        draft = len(speculation.propose(sequence, 8))
        sequence.tokens.append(2)
        if draft:
            speculation.record(sequence, 1, 0)
    steps = 0
    depths: list[int] = []
    while len(depths) < 16:
        steps += 1
        draft = len(speculation.propose(sequence, 8))
        sequence.tokens += [2] * (1 + draft)
        if draft:
            speculation.record(sequence, draft, draft)
            depths.append(draft)
    assert depths[0] == 1
    assert depths[-1] > 3
    assert steps <= 16 + LONGEST_PAUSE


def test_rests_are_known_before_their_tokens_are() -> None:
    """Below `resumes_at` nothing is proposed, and from there on a draft; rests double up to the longest."""
    speculation, sequence = costly(1.0), sequence_of(0, [1], [2])
    assert speculation.resumes_at(sequence) == 0
    assert not speculation.is_probing(sequence)
    rests = list[int]()
    for _ in range(8):
        assert len(speculation.propose(sequence, 8)) == 1
        sequence.tokens.append(2)
        speculation.record(sequence, 1, 0)
        assert speculation.is_probing(sequence)
        rests.append(int(speculation.resumes_at(sequence)) - len(sequence.tokens))
        while len(sequence.tokens) < speculation.resumes_at(sequence):
            assert speculation.propose(sequence, 8) == ()
            sequence.tokens.append(2)
    assert rests == [16, 32, 64, 128, 256, 256, 256, 256]
    speculation.forget(sequence)
    assert speculation.resumes_at(sequence) == 0
    assert speculation.resumes_at(sequence_of(1, [1], [2], speculative=False)) == inf


def test_new_sequences_start_from_what_is_known_of_others() -> None:
    poor, rich = costly(0.1), costly(0.1)
    for seed in range(20):
        serve(poor, 0.0, 50, seed)
        serve(rich, 0.9, 50, seed)
    new = sequence_of(99, [1], [2])
    assert len(poor.propose(new, 8)) == 1, "a first look"
    assert len(rich.propose(new, 8)) > 3


def test_limits_opting_out_and_rests_are_honoured() -> None:
    source = Always()
    speculation = AdaptiveDrafter(source, 8)
    assert len(speculation.propose(sequence_of(0, [1], [2]), 2)) == 2
    assert speculation.propose(sequence_of(1, [1], [2], speculative=False), 8) == ()
    assert speculation.propose(sequence_of(2, [1], [2], speculative=True), 8)
    speculation.is_measuring = True
    assert speculation.propose(sequence_of(3, [1], [2]), 8) == ()
    speculation.record(sequence_of(4, [1], [2]), 3, 1)
    speculation.forget(sequence_of(5, [1], [2]))
    speculation.reset()
    assert (source.noted, source.forgotten, source.num_resets) == ([(3, 1)], [5], 1)


def test_a_real_source_is_asked_only_while_that_pays() -> None:
    speculation = AdaptiveDrafter(PromptLookup(2, 4), 4)
    sequence = sequence_of(0, [1, 2, 3, 4, 1, 2], [3, 4])
    assert list(speculation.propose(sequence, 4))[:1] == [1]
    speculation.forget(sequence)
    speculation.reset()


class Failing(Always):
    """Raises in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.num_calls = 0
        setattr(self, method, self.fail)

    def fail(self, *_: object) -> Tokens[int]:
        self.num_calls += 1
        raise ZeroDivisionError


@pytest.mark.parametrize("method", ["propose", "record", "forget", "reset"])
def test_a_drafter_that_raises_is_asked_no_more(method: str, caplog: pytest.LogCaptureFixture) -> None:
    source = Failing(method)
    speculation, sequence = AdaptiveDrafter(source, 8), sequence_of(0, [1], [2])
    for _ in range(3):
        speculation.propose(sequence, 4)
        speculation.record(sequence, 4, 2)
        speculation.forget(sequence)
        speculation.reset()
    assert speculation.propose(sequence, 4) == ()
    assert speculation.resumes_at(sequence) == inf
    assert source.num_calls == 1
    assert [record.message for record in caplog.records] == ["Failing failed; no more drafts are made"]


class Excessive(Always):
    """Guesses more tokens than it may."""

    def propose(self, sequence: Sequence, limit: int) -> Tokens[int]:
        return super().propose(sequence, limit + 50)


def test_no_more_drafts_are_taken_than_were_asked_for() -> None:
    sequence = sequence_of(0, [1], [2])
    assert AdaptiveDrafter(Excessive(), 8).propose(sequence, 4) == AdaptiveDrafter(Always(), 8).propose(sequence, 4)
