"""Beam search finds the outputs of transformers with its scores, under every history of memory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.memory import check
from tests.conformance.checkpoints import NEW_TOKENS as GREEDY_TOKENS
from tests.conformance.conftest import Reference
from tests.conformance.test_histories import load

NEW_TOKENS = 12

Found = list[tuple[list[int], float]]


@dataclass(frozen=True)
class Case:
    """One search, in the words of both.

    Args:
        has_more_ends: tokens of greedy outputs end an output, besides the model's own end.
        ours, theirs: further parameters.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    has_more_ends: bool = True
    ignore_eos: bool = False
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)

    def params(self, reference: Reference) -> SamplingParams:
        """Return the search as it is asked for here."""
        return SamplingParams(
            beam_width=self.width,
            n=self.width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            stop_token_ids=more_ends(reference) if self.has_more_ends else (),
            ignore_eos=self.ignore_eos,
            max_tokens=NEW_TOKENS,
            **self.ours,
        )


CASES = [
    Case(4),
    Case(2, early_stopping=True),
    Case(3, length_penalty=0.0, early_stopping="never"),
    Case(5, length_penalty=2.0, early_stopping="never"),
    Case(3, length_penalty=-1.0, early_stopping=True),
    Case(6, has_more_ends=False, ignore_eos=True),
    Case(8, length_penalty=0.5, has_more_ends=False),
    Case(
        3,
        ours={"repetition_penalty": 1.3, "min_tokens": 4, "logit_bias": {21: 1.5, 22: -2.0}},
        theirs={"repetition_penalty": 1.3, "min_new_tokens": 4, "sequence_bias": [[[21], 1.5], [[22], -2.0]]},
    ),
]


def more_ends(reference: Reference) -> tuple[int, ...]:
    """Return tokens that come soon in some likely outputs."""
    return tuple(sorted({output[4] for output in reference.outputs if len(output) > 4}))


def ends_of(reference: Reference) -> list[int]:
    """Return the model's own ends."""
    ids = json.loads((reference.folder / "generation_config.json").read_text())["eos_token_id"]
    return ids if isinstance(ids, list) else [ids]


@pytest.fixture(scope="module")
def reference(core_reference: Reference) -> Reference:
    """Return a family's reference."""
    return core_reference


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[Found]]:
    """Return what transformers finds, for each case and for each of the first prompts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.folder, dtype=torch.float32).eval()
    return [[find(model, reference, case, prompt) for prompt in reference.prompts[:4]] for case in CASES]


def find(model: Any, reference: Reference, case: Case, prompt: list[int]) -> Found:
    """Search with transformers."""
    ends = [*(() if case.ignore_eos else ends_of(reference)), *(more_ends(reference) if case.has_more_ends else ())]
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        num_beams=case.width,
        num_return_sequences=case.width,
        length_penalty=case.length_penalty,
        early_stopping=case.early_stopping,
        do_sample=False,
        eos_token_id=ends or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **case.theirs,
    )
    # A checkpoint's own generation config would fill in what is not given.
    model.generation_config = config
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    found = []
    for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        # Behind an end there is only padding.
        length = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
        found.append((tokens[:length], score))
    return found


def search(llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]) -> list[Found]:
    """Search here, and see that nothing is left over."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check(llm.engine.scheduler.memory)
    assert llm.usage().used == 0
    assert not llm.engine.scheduler.sequences
    return [[(one.token_ids, one.beam_score or 0.0) for one in output.outputs] for output in outputs]


def assert_same(found: list[Found], expected: list[Found]) -> None:
    """Compare outputs exactly, and scores to the precision of float32 sums."""
    assert [[tokens for tokens, _ in one] for one in found] == [[tokens for tokens, _ in one] for one in expected]
    scores = [score for one in found for _, score in one]
    assert scores == pytest.approx([score for one in expected for _, score in one], rel=1e-5, abs=2e-4)


def test_each_alone_and_all_together(reference: Reference, expected: list[list[Found]]) -> None:
    llm = load(reference, num_kv_blocks=600, max_num_seqs=64)
    prompts = reference.prompts[:4]
    for case, known in zip(CASES, expected, strict=True):
        alone = [search(llm, [prompt], case.params(reference))[0] for prompt in prompts]
        assert_same(alone, known)
        assert_same(search(llm, prompts, case.params(reference)), known)
    # Some outputs ended by a token, some by their length.
    lengths = {len(tokens) for known in expected for found in known for tokens, _ in found}
    assert NEW_TOKENS in lengths
    assert min(lengths) < NEW_TOKENS


def test_beside_samples_and_other_widths(reference: Reference, expected: list[list[Found]]) -> None:
    """All cases at once, in one batch with samples that draw."""
    llm = load(reference, num_kv_blocks=2000, max_num_seqs=256, enable_prefix_caching=False)
    sampled = SamplingParams(temperature=1.0, n=3, max_tokens=NEW_TOKENS, seed=1)
    params = [case.params(reference) for case in CASES]
    prompts = [prompt for prompt in reference.prompts[:4] for _ in range(len(CASES) + 1)]
    outputs = llm.generate(prompts, [*params, sampled] * 4, use_tqdm=False)
    found = [[(one.token_ids, one.beam_score or 0.0) for one in output.outputs] for output in outputs]
    for idx, known in enumerate(expected):
        assert_same(found[idx :: len(CASES) + 1], known)


@pytest.mark.parametrize(
    "budget", [pytest.param(8, marks=pytest.mark.slow), 13, pytest.param(61, marks=pytest.mark.slow)]
)
def test_chunked_prefill_and_hits(reference: Reference, expected: list[list[Found]], budget: int) -> None:
    llm = load(reference, max_num_seqs=8, max_num_batched_tokens=budget)
    for case, known in list(zip(CASES, expected, strict=True))[:4]:
        assert_same(search(llm, reference.prompts[:4], case.params(reference)), known)
    assert llm.stats.prefix_hits > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(reference: Reference, expected: list[list[Found]], mode: str) -> None:
    """Room for little more than one search: others begin again, or come back from the host as they were."""
    swap: dict[str, Any] = {"swap_space": 16 << 20, "preemption_mode": "swap"} if mode == "swap" else {}
    longest, width = max(map(len, reference.prompts[:4])), max(case.width for case in CASES[:4])
    num_blocks = longest // 4 + width * (-(-(longest + NEW_TOKENS) // 4) - longest // 4)
    llm = load(reference, num_kv_blocks=max(24, num_blocks), max_model_len=96, max_num_seqs=32, block_size=4, **swap)
    params = [case.params(reference) for case in CASES[:4] for _ in range(4)]
    found = search(llm, reference.prompts[:4] * 4, params)
    for idx, known in enumerate(expected[:4]):
        assert_same(found[4 * idx : 4 * idx + 4], known)
    assert llm.stats.num_preemptions > 0
    if mode == "swap":
        assert llm.stats.num_swaps == llm.stats.num_preemptions
        assert llm.stats.wasted_tokens == 0


@pytest.mark.parametrize("method", ["suffix", "draft"])
def test_beside_drafts(reference: Reference, expected: list[list[Found]], method: str) -> None:
    """Samples of the same steps have drafts verified, by what was said before or by a model; beams have none."""
    options: dict[str, Any] = {"draft_model": str(reference.folder)} if method == "draft" else {}
    llm = load(reference, num_kv_blocks=900, max_num_seqs=64, speculative_method=method, **options)
    # A draft is worth trying, whatever this machine's clock says.
    llm.engine.step_recorder.speculation = None
    speculation: Any = llm.engine.scheduler.drafter
    speculation.step_costs = [1.0] * (speculation.num_tokens + 1)
    greedy = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS)
    for case, known in list(zip(CASES, expected, strict=True))[:3]:
        prompts = [*reference.prompts[:4], *reference.prompts]
        outputs = llm.generate(prompts, [case.params(reference)] * 4 + [greedy] * 7, use_tqdm=False)
        found = [[(one.token_ids, one.beam_score or 0.0) for one in output.outputs] for output in outputs[:4]]
        assert_same(found, known)
        assert [output.outputs[0].token_ids for output in outputs[4:]] == reference.outputs
        check(llm.engine.scheduler.memory)
    assert llm.stats.num_accepted_tokens > 0


def test_fewer_are_returned_best_first(reference: Reference, expected: list[list[Found]]) -> None:
    llm = load(reference)
    for num_best in (1, 3):
        params = replace(CASES[0].params(reference), n=num_best)
        found = search(llm, reference.prompts[:4], params)
        assert_same(found, [known[:num_best] for known in expected[0]])
