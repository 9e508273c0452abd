"""Structured beams, against a search without constraints whose logits are masked from scratch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire import LLM, SamplingParams, StructuredOutputs
from quire.text.structured.grammar_setup import CompiledGrammars
from tests.engine.bundled import load
from tests.engine.structured_forms import WANTED
from tests.engine.test_structured import STORY, run


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # A prompt that was found in the cache is computed in fewer rows, whose attention rounds otherwise.
    llm = load(enable_prefix_caching=False)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def grammars(llm: LLM) -> CompiledGrammars:
    return CompiledGrammars(llm.engine.grammars.grammars.model.setup())


@pytest.mark.parametrize("kind", ["json", "compact", "choice", "grammar", "regex"])
@pytest.mark.parametrize("beam_width", [2, 4])
def test_beams_equal_a_search_that_recomputes_every_mask(
    llm: LLM, grammars: CompiledGrammars, kind: str, beam_width: int
) -> None:
    """The slow twin knows no constraint: a processor goes through the whole output again for each row.

    Both compute the same rows in the same steps, so scores are equal to the bit.
    """
    params = partial(SamplingParams, beam_width=beam_width, n=beam_width, max_tokens=60, temperature=0.0)
    form = StructuredOutputs(**WANTED[kind])
    (expected,) = run(llm, STORY, params(structured_outputs=form))
    grammar = grammars.find(form.source)
    num_masked = 0

    def mask(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        nonlocal num_masked
        num_masked += 1
        matcher = grammar.open()
        for token_id in output:
            grammar.forced(matcher)
            assert matcher.try_consume_tokens([token_id]) == 1
        forced = grammar.forced(matcher)
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8) & 1).flatten()[: len(logits)] == 1
        if forced:
            allowed = torch.arange(len(logits)) == forced[0]
        return logits.masked_fill(~allowed, -torch.inf)

    (slow,) = run(llm, STORY, params(logits_processors=(mask,)))
    assert num_masked > beam_width
    assert [one.token_ids for one in slow.outputs] == [one.token_ids for one in expected.outputs]
    assert [one.beam_score for one in slow.outputs] == [one.beam_score for one in expected.outputs]
    assert len(expected.outputs) > 1
