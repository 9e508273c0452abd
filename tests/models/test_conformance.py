"""Every family's decoder, on paged memory, against transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.tiny import CASES, PagedRun, make_tiny, random_tokens, reference_logits

# Of every family, one.
HALVED = ["llama3-rope", "qwen2", "qwen3", "mistral-window", "gemma3", "gemma4", "lfm2", "granite4", "falcon-h1"]
HALVED += ["qwen3.5", "llama4", "qwen3-moe", "phi3-longrope", "gpt-oss", "olmo3"]
# Both dtypes err by the rounding of the same layers: by default float16 has a family of each kind of cache.
HALVED_TWICE = {"llama3-rope", "gemma4", "llama4", "qwen3.5", "falcon-h1"}
HALVES = [
    pytest.param(name, dtype, marks=[] if dtype == torch.bfloat16 or name in HALVED_TWICE else pytest.mark.slow)
    for name in HALVED
    for dtype in (torch.bfloat16, torch.float16)
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def assert_same(found: torch.Tensor, expected: torch.Tensor, factor: float = 20.0) -> None:
    """Compare logits at float32 accuracy; the tolerance is a millionth of their range, times a small factor."""
    assert found.dtype == torch.float32
    tolerance = factor * 1e-6
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [7, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 3, 16, 100))])
@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_prompt_in_chunks(name: str, chunk: int, device: str) -> None:
    tiny = make_tiny(name, device=device)
    token_ids = random_tokens(45)
    run = PagedRun(tiny.decoder, device=device)
    found = [run.step({0: token_ids[start : start + chunk]})[0] for start in range(0, len(token_ids), chunk)]
    assert_same(torch.cat(found), reference_logits(tiny.reference, token_ids))


@pytest.mark.parametrize("block_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))])
@pytest.mark.parametrize("name", CASES)
def test_logits_of_a_ragged_batch(name: str, block_size: int) -> None:
    """Cold prompts, later chunks and single tokens share each step; sequences join late."""
    tiny = make_tiny(name)
    prompts = {seq_id: random_tokens(length, seq_id) for seq_id, length in enumerate((40, 1, 17, 33, 16))}
    takes = [
        {0: 16, 1: 1},
        {0: 1, 2: 5, 3: 33},
        {0: 20, 2: 1, 4: 1},
        {0: 1, 2: 11, 4: 14},
        {4: 1, 0: 2},
    ]
    run = PagedRun(tiny.decoder, block_size=block_size)
    found: dict[int, list[torch.Tensor]] = {seq_id: [] for seq_id in prompts}
    for take in takes:
        rows = {}
        for seq_id, count in take.items():
            start = sum(len(part) for part in found[seq_id])
            rows[seq_id] = prompts[seq_id][start : start + count]
        for seq_id, logits in run.step(rows).items():
            found[seq_id].append(logits)
    for seq_id, prompt in prompts.items():
        assert_same(torch.cat(found[seq_id]), reference_logits(tiny.reference, prompt))


@pytest.mark.parametrize("name", CASES)
def test_greedy_tokens(name: str) -> None:
    """Twelve greedy tokens after a chunked prompt are those of transformers' own generation."""
    tiny = make_tiny(name)
    prompt = random_tokens(20, seed=3)
    generate: Any = tiny.reference.generate
    expected = generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    run = PagedRun(tiny.decoder)
    run.step({0: prompt[:13]})
    found = [int(run.step({0: prompt[13:]})[0][-1].argmax())]
    while len(found) < len(expected):
        found.append(int(run.step({0: found[-1:]})[0][-1].argmax()))
    assert found == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), HALVES)
def test_half_precision_stays_near(name: str, dtype: torch.dtype, device: str) -> None:
    """Half precision errs no more than transformers in the same precision does, give or take its noise."""
    tiny = make_tiny(name, dtype, device)
    exact = make_tiny(name, device=device).reference
    token_ids = random_tokens(45)
    expected = reference_logits(exact, token_ids)
    reference: torch.nn.Module = tiny.reference
    reference.to(dtype)
    theirs = reference_logits(tiny.reference, token_ids)
    run = PagedRun(tiny.decoder, device=device)
    found = torch.cat([run.step({0: part})[0] for part in (token_ids[:30], token_ids[30:44], token_ids[44:])])
    # Of the rows the middle one: where the logits of a router are close, rounding chooses the experts of a row.
    ours, theirs = ((logits - expected).square().mean(1).median() for logits in (found, theirs))
    assert ours < 1.5 * theirs
