"""Prompts with embeddings of their own: the tokens of transformers' `inputs_embeds` under every history."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from quire import LLM, SamplingParams
from quire.engine.inputs.prompts import Prompt
from quire.engine.outputs.outputs import RequestOutput
from quire.memory import check
from tests.conformance.checkpoints import (
    FAMILIES,
    NEW_TOKENS,
    POOL_FACTORS,
    ragged_prompts,
    save_checkpoint,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
# One of each kind of cache; a scale of embeddings, and a multiplier, which transformers applies to given ones too.
NAMES = (
    "granite4",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "mistral-window")),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("llama3", "lfm2")),
)
WIDTH = 64
# With windows alone, little is held.
SCARCE_BLOCKS = {"mistral-window": 7}
# (offset, number of embeddings, which) of each prompt's media.
Places = tuple[tuple[int, int, int], ...]
PLACES: tuple[Places, ...] = (
    (),
    ((0, 5, 0),),
    ((3, 12, 0), (20, 9, 1)),
    ((3, 12, 1), (20, 9, 1)),
    ((4, 12, 0), (20, 9, 1)),
    ((16, 8, 0), (24, 8, 0)),
    ((13, 27, 1),),
    ((39, 1, 0),),
)


class Case(NamedTuple):
    """A checkpoint, the same token ids with other media, and what transformers continues them with.

    Args:
        logprobs: of each token of the outputs.
        scarce_blocks: of a pool in which sequences are preempted.
    """

    folder: Path
    prompts: list[Prompt]
    outputs: list[list[int]]
    logprobs: list[Tensor]
    pool_factor: int
    scarce_blocks: int


def embeddings(which: int, count: int) -> Tensor:
    """Return the first rows of a medium."""
    return torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(which))[:count]


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scale = FAMILIES[request.param][1].get("embedding_multiplier", 1.0)
    token_ids = max(ragged_prompts(), key=len)[:40]
    prompts: list[Prompt] = []
    outputs, logprobs = [], []
    for places in PLACES:
        rows = model.get_input_embeddings()(torch.tensor([token_ids])).detach().clone()
        media = [{"offset": offset, "embeddings": embeddings(which, count)} for offset, count, which in places]
        for offset, count, which in places:
            rows[0, offset : offset + count] = embeddings(which, count) / scale
        greedy = transformers.GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        model.generation_config = greedy
        mask = torch.ones(1, len(token_ids), dtype=torch.int64)
        with torch.inference_mode():
            given = model.generate(
                inputs_embeds=rows,
                attention_mask=mask,
                generation_config=greedy,
                output_logits=True,
                return_dict_in_generate=True,
            )
        outputs.append(given.sequences[0].tolist())
        logprobs.append(torch.stack([step[0].log_softmax(-1).max() for step in given.logits]))
        prompts.append({"prompt_token_ids": token_ids, "media": media} if media else token_ids)
    assert len({tuple(output) for output in outputs}) >= len(PLACES) - 2, "the media hardly matter"
    return Case(
        folder, prompts, outputs, logprobs, POOL_FACTORS.get(request.param, 1), SCARCE_BLOCKS.get(request.param, 12)
    )


def load(case: Case, **options: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "max_model_len": 96, "block_size": 8}
    options = {"num_kv_blocks": 200, **defaults, **options}
    return LLM(str(case.folder), **options | {"num_kv_blocks": options["num_kv_blocks"] * case.pool_factor})


def run(llm: LLM, prompts: list[Prompt], params: SamplingParams = GREEDY) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check(llm.engine.scheduler.memory)  # type: ignore[arg-type]
    assert llm.usage().used == 0
    return outputs


def agree(case: Case, outputs: list[RequestOutput]) -> None:
    """Assert that these are transformers' tokens and log probabilities."""
    assert [output.outputs[0].token_ids for output in outputs] == case.outputs
    for output, expected in zip(outputs, case.logprobs, strict=True):
        found = [next(iter(each.values())).logprob for each in output.outputs[0].logprobs or []]
        torch.testing.assert_close(torch.tensor(found), expected, atol=2e-3, rtol=0)


def test_cold_alone_and_together(case: Case) -> None:
    llm = load(case, enable_prefix_caching=False)
    agree(case, [run(llm, [prompt])[0] for prompt in case.prompts])
    agree(case, run(llm, case.prompts))


def test_only_the_same_media_in_the_same_place_are_hit(case: Case) -> None:
    llm = load(case)
    agree(case, [run(llm, [prompt])[0] for prompt in case.prompts])
    again = [run(llm, [prompt])[0] for prompt in case.prompts]
    agree(case, again)
    has_states = any(group.spec.is_recurrent for group in llm.engine.scheduler.memory.groups)
    assert [output.num_cached_tokens for output in again] == [32 if has_states else 39] * len(PLACES)
    # Each for the first time, after the one before it alone: whole blocks in which media are the same.
    if has_states:
        return
    for before, prompt, num_cached in zip(case.prompts, case.prompts[1:], (0, 0, 0, 0, 0, 8, 8), strict=False):
        llm.reset_prefix_cache()
        _, output = [run(llm, [each])[0] for each in (before, prompt)]
        assert output.num_cached_tokens == num_cached


@pytest.mark.parametrize(
    "budget", [pytest.param(2, marks=pytest.mark.slow), 7, pytest.param(16, marks=pytest.mark.slow)]
)
def test_chunked_prefill(case: Case, budget: int) -> None:
    agree(case, run(load(case, max_num_seqs=2, max_num_batched_tokens=budget), case.prompts))


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cached", "uncached"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(case: Case, mode: str, caching: bool) -> None:
    options = {"swap_space": 8 << 20} if mode == "swap" else {}
    llm = load(case, num_kv_blocks=case.scarce_blocks, enable_prefix_caching=caching, preemption_mode=mode, **options)
    # Behind others of many lengths, who take their memory.
    others: list[Prompt] = [*ragged_prompts()]
    agree(case, run(llm, [*others, *case.prompts])[len(others) :])
    assert llm.stats.num_preemptions > 0
    assert llm.stats.num_swaps == (llm.stats.num_preemptions if mode == "swap" else 0)


def test_forked(case: Case) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, n=3)
    for options in ({}, {"num_kv_blocks": 24, "enable_prefix_caching": False}):
        llm = load(case, **options)
        outputs = run(llm, case.prompts, params)
        assert [[each.token_ids for each in output.outputs] for output in outputs] == [[o] * 3 for o in case.outputs]
    assert llm.stats.num_preemptions > 0, "no sample was opened again, with the media of its prompt"


def test_restarted_from_disk(case: Case, tmp_path: Path) -> None:
    first = load(case, prefix_cache_dir=str(tmp_path / "cache"), swap_space=16 << 20)
    agree(case, run(first, case.prompts))
    first.close()
    again = load(case, prefix_cache_dir=str(tmp_path / "cache"), swap_space=16 << 20)
    outputs = [run(again, [prompt])[0] for prompt in case.prompts]
    agree(case, outputs)
    assert all(output.num_cached_tokens >= 32 for output in outputs)
    # The last one has the first one's whole blocks, which are there by then.
    assert all(output.num_disk_tokens > 0 for output in outputs[:-1])
    again.close()


def test_layers_are_told_of_the_token_ids_that_media_stand_at(tmp_path: Path) -> None:
    """Where a table tells layers of each token, the given ids are looked up in it, and media are projected."""
    folder = save_checkpoint("gemma4", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    token_ids = torch.tensor([max(ragged_prompts(), key=len)[:40]])
    rows = model.get_input_embeddings()(token_ids).detach().clone()
    rows[0, 3:15] = embeddings(0, 12)
    with torch.inference_mode():
        told = model.model.get_per_layer_inputs(token_ids, None)
        logits = model(inputs_embeds=rows, per_layer_inputs=told, use_cache=False).logits[0, -1]
    llm = LLM(str(folder), skip_tokenizer_init=True, dtype="float32", num_threads=1, max_model_len=96)
    prompt = {"prompt_token_ids": token_ids[0].tolist(), "media": [{"offset": 3, "embeddings": embeddings(0, 12)}]}
    (output,) = run(llm, [prompt], SamplingParams(temperature=0.0, max_tokens=1, logprobs=5))
    found = {token_id: each.logprob for token_id, each in (output.outputs[0].logprobs or [])[0].items()}
    expected = logits.log_softmax(-1)
    for token_id, logprob in found.items():
        assert logprob == pytest.approx(expected[token_id].item(), abs=2e-3)
