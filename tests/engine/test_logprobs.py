"""Log probabilities in packed arrays: positions, parts, pickling and their memory."""

from __future__ import annotations

import pickle
import tracemalloc
from array import array

import pytest

from quire.engine.outputs.logprobs import FlatLogprobs, Logprob, PromptLogprobs
from quire.sequences.logprobs import TokenLogprobs


def measured(token_id: int, *top: int) -> TokenLogprobs:
    """Return a position; the log probability of token 7, say, is -7.5."""
    return TokenLogprobs(token_id, -token_id - 0.5, token_id + 1, array("i", top), array("d", [-x - 0.5 for x in top]))


def flat(*positions: TokenLogprobs) -> FlatLogprobs:
    rows = FlatLogprobs()
    for position in positions:
        rows.append(position)
    return rows


def test_a_position_is_a_dictionary_with_the_chosen_token_first() -> None:
    rows = flat(measured(3, 0, 1, 2), measured(0), measured(1, 0, 1))
    assert len(rows) == 3
    assert list(rows[0].items()) == [
        (3, Logprob(-3.5, 4)),
        (0, Logprob(-0.5, 1)),
        (1, Logprob(-1.5, 2)),
        (2, Logprob(-2.5, 3)),
    ]
    assert rows[1] == {0: Logprob(-0.5, 1)}
    assert list(rows[2]) == [1, 0]
    assert rows[-1] == rows[2]
    assert rows[1:] == [rows[1], rows[2]]
    assert [list(position) for position in rows] == [[3, 0, 1, 2], [0], [1, 0]]
    with pytest.raises(IndexError):
        rows[3]


def test_they_compare_as_lists_do_and_can_be_pickled() -> None:
    rows = flat(measured(3, 0, 1), measured(0))
    assert rows == flat(measured(3, 0, 1), measured(0))
    assert rows == [rows[0], rows[1]]
    assert rows != flat(measured(3, 0, 1))
    assert rows != flat(measured(3, 0, 2), measured(0))
    assert pickle.loads(pickle.dumps(rows)) == rows


def test_parts_become_a_whole_and_stay_what_was_measured() -> None:
    positions = [measured(3, 0, 1), measured(0), measured(5, 0, 1, 2), measured(1, 0)]
    rows = flat(*positions[:2])
    rows.extend(flat(*positions[2:]))
    rows.extend(FlatLogprobs())
    assert rows == flat(*positions)
    assert list(rows.measured()) == positions


def test_a_prompt_has_none_in_front() -> None:
    rows = PromptLogprobs(FlatLogprobs())
    assert list(rows) == [None]
    rows.add([measured(3, 0), measured(0)])
    assert len(rows) == 3
    assert (rows[0], rows[-3]) == (None, None)
    assert rows[1:] == [rows[1], rows[2]]
    assert rows[2] == {0: Logprob(-0.5, 1)}
    assert list(rows.measured()) == [None, measured(3, 0), measured(0)]


def test_an_entry_takes_a_few_bytes() -> None:
    position = measured(70, *range(64))
    tracemalloc.start()
    try:
        rows = flat(*[position] * 1000)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # 12 bytes, and what arrays keep to grow. A `Logprob` of its own, in a dictionary, took 250.
    assert size / (len(rows) * 65) < 16
