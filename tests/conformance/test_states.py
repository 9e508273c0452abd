"""Recurrent layers hold one state a sequence in a running engine, and prefixes are found again at their snapshots."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.errors import ConfigError
from quire.memory import RecurrentState, check
from tests.conformance.checkpoints import ragged_prompts, save_checkpoint

BLOCK_SIZE = 8
# The default run has the histories of `falcon-h1` in test_histories.py.
HYBRIDS = ["lfm2", "qwen3.5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite4", "falcon-h1"))]
# Pools in which not all that is published can stay.
SCARCE = {"lfm2": 30, "granite4": 60, "falcon-h1": 60, "qwen3.5": 60}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "num_threads": 1, "block_size": BLOCK_SIZE}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **OPTIONS | {"max_model_len": 400, "num_kv_blocks": 1000} | options)


def generate(llm: LLM, prompt: list[int], max_tokens: int = 24) -> tuple[list[int], int]:
    """Return the greedy continuation of a prompt, and how many of its tokens were found."""
    (output,) = llm.generate([prompt], greedy(max_tokens), use_tqdm=False)
    check(llm.engine.scheduler.memory)
    assert output.num_cached_tokens is not None
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("budget", [8, 64])
def test_a_sequence_holds_one_state_however_long_it_is(family: str, budget: int, tmp_path: Path) -> None:
    llm = load(save_checkpoint(family, tmp_path), max_num_seqs=8, max_num_batched_tokens=budget)
    engine, groups = llm.engine, llm.engine.scheduler.memory.groups
    state_idx = [isinstance(group.spec, RecurrentState) for group in groups].index(True)
    prompt = max(ragged_prompts(), key=len)
    engine.add_request("a", prompt, greedy(60))
    while engine.has_unfinished:
        engine.step()
        assert engine.usage().groups[state_idx].used <= 1
    # What is left is the snapshot close to the prompt's end, and no block of the decoded tokens' states.
    assert engine.usage().groups[state_idx].idle == 1


@pytest.mark.parametrize("family", HYBRIDS)
def test_prompts_hit_where_they_were_seen_to_part(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path)
    plain = load(folder, enable_prefix_caching=False)
    llm = load(folder)
    shared = list(range(20, 65))
    tails = [[100, 101, 102], [110, 111, 112, 113], [120] * 20]
    prompts = [shared + tail for tail in tails]
    expected = [generate(plain, prompt)[0] for prompt in prompts]
    found = [generate(llm, prompt) for prompt in prompts]
    assert [token_ids for token_ids, _ in found] == expected
    # The first leaves a snapshot at its own end only. The second is seen to part at 40 of 45 shared tokens.
    assert [num_cached for _, num_cached in found] == [0, 40, 40]
    assert len(shared) // BLOCK_SIZE * BLOCK_SIZE == 40
    # Another one parts earlier, where no state is; it leaves one, and the next finds it.
    early = [shared[:27] + [130 + idx] * 9 for idx in range(3)]
    assert [generate(llm, prompt)[1] for prompt in early] == [0, 24, 24]


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_chat_goes_on_from_its_last_prompt(family: str, tmp_path: Path) -> None:
    folder = save_checkpoint(family, tmp_path)
    plain, llm = load(folder, enable_prefix_caching=False), load(folder)
    prompt = [20 + idx for idx in range(30)]
    for _ in range(4):
        expected, _ = generate(plain, prompt)
        found, _ = generate(llm, prompt)
        assert found == expected
        prompt = [*prompt, *found, 77, 78, 79]
    num_tokens = len(prompt)
    assert generate(llm, prompt)[1] >= num_tokens - 24 - 3 - 24 - 3 - BLOCK_SIZE


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("interval", [BLOCK_SIZE, pytest.param(3 * BLOCK_SIZE, marks=pytest.mark.slow)])
def test_regular_snapshots(family: str, interval: int, tmp_path: Path) -> None:
    """A prompt that goes another way is found up to the last snapshot before; in a small pool, whatever is left."""
    folder = save_checkpoint(family, tmp_path)
    plain, llm = load(folder, enable_prefix_caching=False), load(folder, state_snapshot_interval=interval)
    prompts = [[20 + idx for idx in range(length)] + [150] * 9 for length in (90, 71, 40, 90, 33)]
    expected = [generate(plain, prompt)[0] for prompt in prompts]
    found = [generate(llm, prompt) for prompt in prompts]
    assert [token_ids for token_ids, _ in found] == expected
    # The fourth prompt is the first one again: it is found up to its last block.
    assert [num_cached for _, num_cached in found] == [
        0,
        *(n // interval * interval for n in (71, 40)),
        96,
        33 // interval * interval,
    ]
    scarce = load(folder, state_snapshot_interval=interval, num_kv_blocks=SCARCE[family], max_model_len=128)
    for _ in range(2):
        outputs = scarce.generate(prompts, greedy(24), use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    check(scarce.engine.scheduler.memory)
    assert scarce.usage().num_evictions > 0


@pytest.mark.parametrize("family", HYBRIDS)
def test_the_smallest_pool_holds_the_longest_sequence(family: str, tmp_path: Path) -> None:
    """The budget that the refusal names starts an engine, which serves the longest sequence; a byte less is refused."""
    folder = save_checkpoint(family, tmp_path)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "num_kv_blocks": None}
    with pytest.raises(ConfigError) as refused:
        load(folder, **options, kv_cache_memory_bytes=100_000)
    words = re.search(r"set kv_cache_memory_bytes to at least (\d+) bytes$", str(refused.value))
    assert words is not None
    least = int(words[1])
    with pytest.raises(ConfigError):
        load(folder, **options, kv_cache_memory_bytes=least - 1)
    prompt = [10 + idx % 180 for idx in range(340)]
    found, _ = generate(load(folder, **options, kv_cache_memory_bytes=least), prompt, 60)
    assert len(found) == 60
    assert found == generate(load(folder), prompt, 60)[0]


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize(("dtype", "stored"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8")])
def test_the_engine_allocates_what_was_planned(
    family: str, dtype: str, stored: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_checkpoint(family, tmp_path)
    capsys.readouterr()
    flags = [
        f"--dtype={dtype}",
        f"--kv-cache-dtype={stored}",
        f"--block-size={BLOCK_SIZE}",
        "--kv-cache-memory-bytes=2M",
        "--max-model-len=400",
    ]
    assert main(["plan", str(folder), "--json", *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    options = {"dtype": dtype, "kv_cache_dtype": stored, "num_kv_blocks": None}
    llm = load(folder, **options, kv_cache_memory_bytes=2_000_000)
    tokens, state = plan["groups"]
    kv, states = llm.engine.executor._runner._storages  # type: ignore[attr-defined]
    assert kv.data[0].nbytes == tokens["bytes_per_block"]
    assert states.data[0].nbytes == state["bytes_per_sequence"]
    for storage in (kv, states):
        assert plan["arena_bytes"] - storage.data[0].nbytes < storage.data.nbytes <= plan["arena_bytes"]


@pytest.mark.parametrize("family", HYBRIDS)
def test_without_a_budget_every_seat_has_room(family: str, tmp_path: Path) -> None:
    llm = load(save_checkpoint(family, tmp_path), num_kv_blocks=None, max_num_seqs=3, max_model_len=64)
    prompts = [[10 + seed + 7 * idx % 90 for idx in range(40)] for seed in range(3)]
    llm.generate(prompts, greedy(24), use_tqdm=False)
    assert llm.stats.num_preemptions == 0
    assert llm.usage().num_evictions == 0
