"""Embeddings equal the last hidden states of transformers under every history."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
import transformers

from quire import LLM, PoolingParams, SamplingParams
from quire.engine.inputs.prompts import Prompt
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.outputs.outputs import RequestOutput
from quire.memory import check
from quire.sequences.pooling import NO_SAMPLING, OF_ALL_ROWS, Pooling
from tests.conformance.conftest import Reference
from tests.conformance.test_histories import load, longest_hit

RAW = PoolingParams(normalize=False)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
IDS = (3, 150, 7)
# The last hidden states after the last norm, and the logits there.
Expected = tuple[list[torch.Tensor], list[torch.Tensor]]


@pytest.fixture(scope="module")
def expected(core_reference: Reference) -> Expected:
    """Return transformers' last hidden state after the last norm, and the logits there, of each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(core_reference.folder, dtype=torch.float32).eval()
    hidden, logits = [], []
    with torch.inference_mode():
        for prompt in core_reference.prompts:
            out = model(torch.tensor([prompt]), output_hidden_states=True)
            hidden.append(out.hidden_states[-1][0, -1])
            logits.append(out.logits[0, -1])
    return hidden, logits


def agree(llm: LLM, prompts: list[list[int]], hidden: list[torch.Tensor]) -> list[int]:
    """Compare the embeddings of prompts; return how many of each one's tokens came from the cache."""
    outputs = llm.embed(prompts, RAW, use_tqdm=False)
    for output, prompt, each in zip(outputs, prompts, hidden, strict=True):
        assert output.prompt_token_ids == prompt
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), each, rtol=2e-4, atol=2e-4)
    check(llm.engine.scheduler.memory)
    assert llm.usage().used == 0
    return [output.num_cached_tokens for output in outputs]


def test_embeddings_cold_hit_and_chunked(core_reference: Reference, expected: Expected) -> None:
    prompts, hidden = core_reference.prompts, expected[0]
    llm = load(core_reference)
    for prompt, each in zip(prompts, hidden, strict=True):
        agree(llm, [prompt], [each])
    # Each prompt now has a hit of all it can have: its last token is computed again.
    cached = agree(llm, prompts, hidden)
    for count, prompt in zip(cached, prompts, strict=True):
        assert longest_hit(llm, len(prompt) - 1) - 8 < count < len(prompt)
    llm.reset_prefix_cache()
    agree(llm, prompts, hidden)
    llm = load(core_reference, max_num_seqs=3, max_num_batched_tokens=5)
    agree(llm, prompts, hidden)


@pytest.mark.parametrize(("num_seqs", "swap_space"), [(1, 0), (1, 1 << 24), (8, 0)])
def test_embeddings_among_generations(
    core_reference: Reference, expected: Expected, num_seqs: int, swap_space: int
) -> None:
    """Requests of both kinds share blocks and steps; or, with one seat, texts preempt half-computed prompts."""
    mode = "swap" if swap_space else "recompute"
    options: dict[str, Any] = {"swap_space": swap_space, "preemption_mode": mode, "scheduling_policy": "priority"}
    llm = load(core_reference, max_num_batched_tokens=3 + num_seqs, max_num_seqs=num_seqs, **options)
    engine, prompts = llm.engine, core_reference.prompts
    for idx, prompt in enumerate(prompts):
        pooled = [engine.requests.prepare_pooled(prompt, pooling) for pooling in (Pooling(), Pooling(IDS))]
        engine.add_request(f"state-{idx}", pooled[0], NO_SAMPLING, RequestOptions(priority=1))
        engine.add_request(f"logits-{idx}", pooled[1], NO_SAMPLING, RequestOptions(priority=1))
    whole: dict[str, RequestOutput] = {}
    late = list(prompts)
    while late or engine.has_unfinished:
        halfway = [each for each in engine.scheduler.running if each.num_computed and each.request.pooling]
        if late and (halfway or not engine.has_unfinished):
            engine.add_request(f"text-{len(late) - 1}", late.pop(), GREEDY)
        for output in engine.step():
            if output.request_id in whole:
                whole[output.request_id].add(output)
            else:
                whole[output.request_id] = output
    stats = engine.scheduler.stats
    assert stats.num_swaps == (stats.num_preemptions if swap_space else 0)
    if num_seqs == 1:
        assert sum(whole[name].metrics.num_preemptions for name in whole if not name.startswith("text")) > 0
    for idx, (state, logits) in enumerate(zip(*expected, strict=True)):
        text, *states = (whole[f"{kind}-{idx}"] for kind in ("text", "state", "logits"))
        assert text.outputs[0].token_ids == core_reference.outputs[idx][:12]
        assert text.pooled == ()
        for output, wanted in zip(states, (state, logits[list(IDS)]), strict=True):
            assert [(each.token_ids, each.finish_reason) for each in output.outputs] == [([], "stop")]
            torch.testing.assert_close(torch.tensor(output.pooled), wanted, rtol=2e-4, atol=2e-4)
    check(engine.scheduler.memory)
    assert llm.usage().used == 0


def test_embeddings_are_normalised_and_cut(core_reference: Reference, expected: Expected) -> None:
    llm, (state, *_) = load(core_reference), expected[0]
    prompt = cast(Prompt, core_reference.prompts[0])
    for params, wanted in (
        (None, state / state.norm()),
        (PoolingParams(dimensions=10), state[:10] / state[:10].norm()),
        (PoolingParams(dimensions=10, normalize=False), state[:10]),
    ):
        (output,) = llm.embed(prompt, params, use_tqdm=False)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), wanted, rtol=2e-4, atol=2e-4)


def pooled(hidden: torch.Tensor, kind: str, first: int) -> torch.Tensor:
    """Return the pooled state of hidden states [T, E] without the first rows."""
    rows, weights = hidden[first:].double(), torch.arange(first + 1, len(hidden) + 1).double()
    by_kind = {
        "max": rows.amax(0),
        "mean": rows.mean(0),
        "mean_sqrt_len_tokens": rows.sum(0) / math.sqrt(len(rows)),
        "weightedmean": (weights[:, None] * rows).sum(0) / weights.sum(),
    }
    return by_kind[kind].float()


@pytest.mark.parametrize("swap_space", [0, 1 << 24])
def test_poolings_in_chunks_and_after_preemptions(core_reference: Reference, swap_space: int) -> None:
    """Poolings of all hidden states: no prefix is reused for them, and each token counts once in any history."""
    model = transformers.AutoModel.from_pretrained(core_reference.folder, dtype=torch.float32).eval()
    prompts = [*core_reference.prompts, core_reference.prompts[-1]]
    kinds = sorted(OF_ALL_ROWS - {"tokens"}) * 2
    firsts = [min(5, len(prompt) - 1) if idx % 2 else 0 for idx, prompt in enumerate(prompts)]
    with torch.inference_mode():
        hidden = [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]
    wanted = [pooled(*each) for each in zip(hidden, kinds, firsts, strict=True)]
    mode = "swap" if swap_space else "recompute"
    options: dict[str, Any] = {"swap_space": swap_space, "preemption_mode": mode, "scheduling_policy": "priority"}
    llm = load(core_reference, max_num_batched_tokens=4, max_num_seqs=1, **options)
    engine, found, late = llm.engine, {}, prompts[-2:]
    for idx, prompt in enumerate(prompts):
        prepared = engine.requests.prepare_pooled(prompt, Pooling(kind=kinds[idx]))
        prepared = prepared._replace(pooling=Pooling(kind=kinds[idx], first=firsts[idx]))
        engine.add_request(f"pool-{idx}", prepared, NO_SAMPLING, RequestOptions(priority=1))
    while engine.has_unfinished:
        if late and any(each.num_computed > 4 and each.request.pooling for each in engine.scheduler.running):
            engine.add_request(f"text-{len(late)}", late.pop(), SamplingParams(temperature=0.0, max_tokens=2))
        for output in engine.step():
            if output.pooled:
                assert output.num_cached_tokens == 0
                found[output.request_id] = output.pooled
    assert engine.scheduler.stats.num_preemptions == 2
    for idx, each in enumerate(wanted):
        torch.testing.assert_close(torch.tensor(found[f"pool-{idx}"]), each, rtol=2e-4, atol=2e-4)
    check(engine.scheduler.memory)
    assert llm.usage().used == 0
