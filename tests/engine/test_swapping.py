"""Swapping in an engine: options, counters, measured rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.scheduling import TransferRates
from tests.conformance.checkpoints import save_checkpoint

OPTIONS = {"skip_tokenizer_init": True, "num_threads": 1, "max_model_len": 96, "block_size": 8, "num_kv_blocks": 12}
PROMPTS = [[token] * 30 for token in (5, 6, 7, 8)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, detokenize=False)


def test_what_is_swapped_is_counted_and_changes_no_token() -> None:
    llm = LLM("bundled", **OPTIONS, swap_space=16 << 20, preemption_mode="swap")
    engine = llm.engine
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, PARAMS)
    outputs: dict[str, list[int]] = {}
    steps, preemptions = [], []
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)
            if output.finished:
                preemptions.append(output.metrics.num_preemptions)
        steps.append(engine.measure())
    expected = LLM("bundled", **(OPTIONS | {"num_kv_blocks": 100})).generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [outputs[str(number)] for number in range(4)] == [output.outputs[0].token_ids for output in expected]
    stats, host = llm.stats, llm.usage().host
    assert host is not None
    assert stats.num_swaps == stats.num_preemptions == sum(preemptions) == sum(step.num_swaps for step in steps) > 0
    assert max(step.num_swapped for step in steps) > 0
    assert max(step.host_usage for step in steps) > 0
    assert steps[-1].host_usage == 0
    assert sum(step.swap_out_blocks for step in steps) == host.num_swap_outs > 0
    assert sum(step.swap_in_blocks for step in steps) == host.num_swap_ins > 0
    costs = engine.scheduler.preemption.rates
    assert costs.copy_bytes_per_s != TransferRates().copy_bytes_per_s, "measured when the engine started"
    assert costs.prefill_tokens_per_s != TransferRates().prefill_tokens_per_s, "measured as it ran"


@pytest.mark.parametrize("family", [None, "gemma4", "falcon-h1"])
def test_a_swap_space_below_one_block_is_refused_with_the_minimum(family: str | None, tmp_path: Path) -> None:
    """Where groups have blocks of several sizes, a slab may take more than a block of each."""
    options = {**OPTIONS, "num_kv_blocks": 100}
    model = "bundled" if family is None else str(save_checkpoint(family, tmp_path))
    with pytest.raises(ConfigError, match=r"swap_space \(4,096\) must be 0, or at least ([\d,]+)") as caught:
        LLM(model, **options, swap_space=4096)
    assert caught.value.field == "swap_space"
    least = int(str(caught.value).split("at least ")[1].split(":")[0].replace(",", ""))
    llm = LLM(model, **options, swap_space=2 * least)
    host = llm.usage().host
    assert host is not None
    assert any(f"of host memory ({host.num_blocks} blocks)" in line for line in llm.resolved.lines())
    assert LLM(model, **options, swap_space=least).usage().host is not None
    with pytest.raises(ConfigError):
        LLM(model, **options, swap_space=least - 1)
