"""Steps with prompts whose pieces between attention are captured, by CUDA graphs or their twin."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.memory import check
from tests.conformance.checkpoints import ragged_prompts, save_checkpoint
from tests.conformance.conftest import REPRESENTATIVES, make_reference
from tests.ops.triton.device import MARKS
from tests.ops.triton.test_engine import GREEDY, NUM_TOKENS, load

pytestmark = MARKS
PIECES: dict[str, Any] = {"cudagraph_capture_sizes": (1, 4), "cudagraph_mode": "full_and_piecewise"}
FEW: dict[str, Any] = {**PIECES, "piecewise_cudagraph_capture_sizes": (8, 24), "max_num_batched_tokens": 20}


@pytest.mark.parametrize("is_ahead", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("name", sorted(REPRESENTATIVES))
def test_greedy_tokens(name: str, is_ahead: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prompts in chunks, beside decodes, and from the cache: no step is launched kernel by kernel."""
    reference = make_reference(name, tmp_path_factory)
    llm = load(str(reference.folder), reference.pool_factor, **FEW, async_scheduling=is_ahead)
    runner = llm.engine.executor._runner  # type: ignore[attr-defined]
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        for count in (NUM_TOKENS, NUM_TOKENS - 2, NUM_TOKENS - 1)
    ]
    for _ in range(2):
        outputs = llm.generate(reference.prompts[:3], params, use_tqdm=False)
        for output, expected in zip(outputs, reference.outputs, strict=False):
            tokens = output.outputs[0].token_ids
            known = min(len(tokens), len(expected))
            assert list(tokens[:known]) == list(expected[:known])
    assert runner.captured.num_replayed_in_pieces > 1
    assert runner.captured.num_replayed + runner.captured.num_replayed_in_pieces == runner._builder.use.num_steps
    check(llm.engine.scheduler.memory)


def num_in_pieces(llm: LLM) -> int:
    """Return the number of steps that were replayed in pieces; 0 if none is captured."""
    captured = llm.engine.executor._runner.captured  # type: ignore[attr-defined]
    return 0 if captured is None else int(captured.num_replayed_in_pieces)


def test_steps_of_any_kind(tmp_path: Path) -> None:
    """Forks, beams, prompt log probabilities and embeddings are what they are without captures."""
    folder = str(save_checkpoint("llama3", tmp_path))
    prompts = [prompt[:30] * 2 for prompt in ragged_prompts()[:2]]
    params = [
        SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=4, ignore_eos=True),
        SamplingParams(beam_width=2, max_tokens=3),
        SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1),
    ]
    found = []
    for options in ({}, FEW):
        with load(folder, **options, enable_prefix_caching=False) as llm:
            outputs, counts = [], [num_in_pieces(llm)]
            for one in params:
                outputs += llm.generate(prompts, one, use_tqdm=False)
                counts.append(num_in_pieces(llm))
            embedded = llm.embed(prompts, use_tqdm=False)
            counts.append(num_in_pieces(llm))
            if options:
                assert all(later > earlier for earlier, later in pairwise(counts)), "each kind has a step in pieces"
        measured = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
        logprobs = [one.logprob for of in measured for each in of if each for one in each.values()]
        tokens = [[sample.token_ids for sample in output.outputs] for output in outputs]
        found.append((tokens, logprobs, [each.outputs.embedding for each in embedded]))
    assert found[0][0] == found[1][0]
    for before, after in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(torch.tensor(after), torch.tensor(before), rtol=1e-4, atol=1e-4)


def test_drafts_are_verified_in_pieces(tmp_path: Path) -> None:
    folder = str(save_checkpoint("llama3", tmp_path))
    # Most tokens that are drawn have been seen.
    prompts = [list(range(first, first + 110)) for first in (10, 80)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = []
    drafts = {"speculative_method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    sizes = {"max_num_batched_tokens": 128, "piecewise_cudagraph_capture_sizes": (8, 128)}
    for options in ({}, {**PIECES, **sizes, **drafts}):
        with load(folder, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            if options:
                assert llm.stats.num_draft_tokens > 0
                assert llm.engine.executor._runner.captured.num_replayed_in_pieces > 1  # type: ignore[attr-defined]
    assert found[0] == found[1]


def test_larger_steps_are_launched(tmp_path_factory: pytest.TempPathFactory) -> None:
    reference = make_reference("llama3", tmp_path_factory)
    llm = load(str(reference.folder), **PIECES, piecewise_cudagraph_capture_sizes=(4,))
    runner = llm.engine.executor._runner  # type: ignore[attr-defined]
    assert len(reference.prompts[1]) > 4
    (output,) = llm.generate(reference.prompts[1:2], GREEDY, use_tqdm=False)
    known = len(reference.outputs[1])
    assert list(output.outputs[0].token_ids[:known]) == list(reference.outputs[1][:NUM_TOKENS])
    assert runner.captured.num_replayed_in_pieces == 0
    assert runner.captured.num_replayed == NUM_TOKENS - 1
