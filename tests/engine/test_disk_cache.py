"""The prefix cache on disk in a running engine: found after a restart, and never wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.distributed.kvstore.counters import StoreStats
from quire.distributed.kvstore.record import ArrivingBytes
from quire.engine.async_llm import AsyncLLM
from quire.engine.inputs.request_options import RequestOptions
from quire.engine.kv.disk_prefetch import REFUSALS, SAVE_S
from quire.engine.outputs.outputs import RequestOutput
from quire.errors import ConfigError
from quire.memory import check
from quire.memory.results import Tier
from tests.engine.test_record_memory import replayed

STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "
PROMPTS = [STORY * 3 + "Then", STORY * 3 + "But", STORY * 2]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DEFAULTS: dict[str, Any] = {"num_kv_blocks": 100, "max_model_len": 256, "block_size": 8, "num_threads": 1}


@pytest.fixture(autouse=True, params=[False, True], ids=["step-by-step", "asynchronous"])
def scheduling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "async_scheduling", request.param)


@pytest.fixture(autouse=True)
def little_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what comes from disk go through few blocks: every one of them is looked at when memory is checked."""
    monkeypatch.setattr("quire.config.cache.STAGING_BYTES", 4 << 20)


def start(folder: Path, **options: Any) -> LLM:
    """Start the bundled model with a prefix cache in a folder."""
    return LLM(prefix_cache_dir=str(folder), **(DEFAULTS | options))


def run(llm: LLM, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """Generate for all prompts, one after the other, and see that memory is sound."""
    outputs = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt in PROMPTS]
    memory = llm.engine.scheduler.memory
    check(memory)
    return outputs


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def disk_stats(llm: LLM) -> StoreStats:
    stats = llm.stats.disk
    assert stats is not None
    return stats


@pytest.fixture
def expected(tmp_path: Path) -> list[str]:
    """Return what a first engine generated, which then closed."""
    llm = start(tmp_path / "cache")
    outputs = run(llm)
    assert sum(output.num_disk_tokens for output in outputs) == 0
    llm.close()
    assert disk_stats(llm).num_saved > 10
    return texts(outputs)


def test_a_restart_finds_what_was_computed_before(tmp_path: Path, expected: list[str]) -> None:
    llm = start(tmp_path / "cache")
    outputs = run(llm)
    assert texts(outputs) == expected
    # The first brings up all its full blocks; the others find most of theirs on the device by then.
    first, second, third = outputs
    assert first.num_disk_tokens == first.num_cached_tokens == (len(first.prompt_token_ids) - 1) // 8 * 8
    assert 0 <= second.num_disk_tokens < 32
    assert second.prompt_account is not None
    num_whole = second.num_cached_tokens - second.prompt_account.sources.copied
    assert num_whole == (len(second.prompt_token_ids) - 1) // 8 * 8
    assert third.num_disk_tokens == 0
    num_disk = llm.stats.first_time.sources.disk
    assert num_disk == first.num_disk_tokens + second.num_disk_tokens
    assert disk_stats(llm).num_hits * 8 == num_disk
    llm.close()
    llm.close()


def test_saving_at_the_end_takes_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.kv.disk_prefetch.PART_BYTES", 1)
    llm = start(tmp_path / "cache")
    run(llm)
    assert disk_stats(llm).num_saved == 0
    # A clock that advances by a quarter of the time at each reading: loading each part, here a block, takes that long.
    llm.engine._clock = itertools.count(0.0, SAVE_S / 4).__next__
    llm.close()
    assert disk_stats(llm).num_saved == 4


def test_another_salt_finds_nothing(tmp_path: Path, expected: list[str]) -> None:
    llm = start(tmp_path / "cache")
    llm.engine.add_request("a", PROMPTS[0], GREEDY, RequestOptions(cache_salt="tenant"))
    outputs = [output for _ in range(100) if llm.engine.has_unfinished for output in llm.engine.step()]
    assert outputs[-1].num_cached_tokens == 0
    assert "".join(output.outputs[0].text for output in outputs) == expected[0]
    assert disk_stats(llm).num_hits == 0
    llm.close()


def test_tenants_find_their_own_after_a_restart_and_nobody_else_s(tmp_path: Path) -> None:
    llm = start(tmp_path / "cache")
    (first,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, tenant="acme")
    llm.close()
    llm = start(tmp_path / "cache")
    for tenant, is_there in (("zeta", False), (None, False), ("acme", True)):
        (output,) = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False, tenant=tenant)
        assert texts([output]) == texts([first])
        assert (output.num_cached_tokens > 0, output.num_disk_tokens > 0) == (is_there, is_there)
    llm.close()


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"block_size": 16}, {"quantization": "int8"}])
def test_another_layout_finds_nothing(tmp_path: Path, expected: list[str], options: dict[str, Any]) -> None:
    llm = start(tmp_path / "cache", **options)
    outputs = run(llm)
    assert texts(outputs)[0][:8] == expected[0][:8]
    assert sum(output.num_disk_tokens for output in outputs) == 0
    assert disk_stats(llm).num_foreign > 10
    llm.close()


def test_a_flipped_byte_on_disk_changes_a_counter_and_no_token(tmp_path: Path, expected: list[str]) -> None:
    file = tmp_path / "cache" / "blocks.mdb"
    data = bytearray(file.read_bytes())
    # Records are the bulk of the file; a byte of each page is flipped, behind the header that LMDB needs.
    for page in range(len(data) // 4096):
        data[page * 4096 + 2048] ^= 0x10
    file.write_bytes(data)
    llm = start(tmp_path / "cache")
    assert texts(run(llm)) == expected
    assert disk_stats(llm).num_damaged > 0
    llm.close()


def test_a_reset_forgets_the_disk(tmp_path: Path, expected: list[str]) -> None:
    llm = start(tmp_path / "cache")
    llm.reset_prefix_cache()
    first = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
    assert (first.num_cached_tokens, first.outputs[0].text) == (0, expected[0])
    # What is computed from then on is saved.
    llm.close()
    again = start(tmp_path / "cache")
    assert again.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].num_disk_tokens > 0
    again.close()


def test_a_long_prompt_comes_up_in_several_steps(tmp_path: Path, expected: list[str]) -> None:
    """A step loads no more tokens than it may compute; the prompt waits, and so do those after it."""
    llm = start(tmp_path / "cache", max_num_batched_tokens=16, max_num_seqs=2)
    assert texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert llm.stats.first_time.sources.disk > 16
    assert disk_stats(llm).num_misses == 0
    llm.close()


def test_prompt_logprobs_load_nothing_for_what_must_be_computed(tmp_path: Path, expected: list[str]) -> None:
    llm = start(tmp_path / "cache")
    params = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1)
    output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    assert output.outputs[0].text == expected[0]
    assert disk_stats(llm).num_hits == 0
    llm.close()


def test_what_memory_could_not_keep_is_found_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small device, small host: evicted blocks go down and come up again while the engine runs."""
    monkeypatch.setattr("quire.config.cache.STAGING_BYTES", 9 * 16384)
    llm = start(tmp_path / "cache", num_kv_blocks=14, max_model_len=96, max_num_seqs=2)
    assert llm.resolved.bytes_per_block == 16384
    names = ("Tom", "Anna", "Ben", "Mia", "Lily", "Sam")
    prompts = [f"{name} went to the forest and found a red kite there. " * 4 for name in names]
    first = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    again = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert texts(again) == texts(first)
    check(llm.engine.scheduler.memory)
    assert disk_stats(llm).num_saved > 0
    assert sum(output.num_disk_tokens for output in again) > 0
    llm.close()


def test_a_recording_is_replayed_without_the_disk(tmp_path: Path, expected: list[str]) -> None:
    log = tmp_path / "memory.log"
    llm = start(tmp_path / "cache", record_memory=str(log), max_num_batched_tokens=32, max_num_seqs=2)
    assert texts(run(llm)) == expected
    llm.close()
    report = replayed(log)
    assert report.num_commands["publish_loaded"] > 1


def test_options_that_cannot_be_honoured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="prefix_cache_disk_bytes must be at least"):
        start(tmp_path, prefix_cache_disk_bytes=1000)
    # What was refused holds nothing, and what is open is one engine's of this process.
    llm = start(tmp_path)
    with pytest.raises(ConfigError, match="in use by another engine"):
        start(tmp_path)
    llm.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a folder that can be written"):
        start(tmp_path / "file")


def test_the_counters_are_among_the_metrics(tmp_path: Path, expected: list[str]) -> None:
    llm = AsyncLLM.from_options(prefix_cache_dir=str(tmp_path / "cache"), max_model_len=256, block_size=8)

    async def generate() -> str:
        return "".join([delta.outputs[0].text async for delta in llm.generate(PROMPTS[0], GREEDY)])

    assert asyncio.run(generate()) == expected[0]
    shown = llm.metrics.render().decode()
    llm.shutdown()
    stats = llm.stats().disk
    assert stats is not None
    assert f'vllm:prefix_cache_disk_hits_total{{engine="0",model_name="bundled"}} {float(stats.num_hits)}' in shown
    assert f'vllm:prefix_cache_disk_blocks{{engine="0",model_name="bundled"}} {float(stats.num_blocks)}' in shown
    assert stats.num_hits > 0


@pytest.mark.slow
def test_the_command_line_finds_what_it_computed_before(tmp_path: Path) -> None:
    """Two processes, one after the other."""
    command = [sys.executable, "-m", "quire", "generate", "--prefix-cache-dir", str(tmp_path), "--json"]
    command += ["--temperature", "0", "--max-tokens", "8", "--prompt", PROMPTS[0]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    first, second = (
        json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout) for _ in range(2)
    )
    assert first["num_disk_tokens"] == 0
    assert second["num_disk_tokens"] == second["num_cached_tokens"] > 40
    assert second["outputs"] == first["outputs"]


class LateCopy:
    """A copy as from a GPU: made in its turn, and there a few looks later.

    Attributes:
        num_put_off: number of copies that were not there when they were first looked at.
    """

    num_put_off = 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._num_looks = tensor.clone(), 0

    @property
    def is_ready(self) -> bool:
        self._num_looks += 1
        LateCopy.num_put_off += self._num_looks == 1
        return self._num_looks > 3

    def wait(self) -> torch.Tensor:
        return self._tensor


def have_blocks_arrive_late(monkeypatch: pytest.MonkeyPatch, late: Callable[[torch.Tensor], ArrivingBytes]) -> None:
    """Have blocks of the device be copied as those of a GPU; those of the host tier are there."""

    def to_save(row: torch.Tensor, tier: Tier) -> torch.Tensor | Callable[[], ArrivingBytes]:
        return partial(late, row) if tier is Tier.DEVICE else row

    monkeypatch.setattr("quire.execution.step.block_copies.bytes_to_save", to_save)


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_blocks_that_arrive_late_are_saved_as_they_were(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes are those of their turn, though the blocks are others' when they are written."""
    have_blocks_arrive_late(monkeypatch, LateCopy)
    monkeypatch.setattr(LateCopy, "num_put_off", 0)
    scarce = {"num_kv_blocks": 22, "max_model_len": 160, "swap_space": 1 << 17, "prefix_cache_write_policy": policy}
    prompts = [f"{name}: {STORY * 2}" for name in ("Tom", "Anna", "Ben", "Lily", "Max", "Sue")]

    def served(llm: LLM) -> list[str]:
        rounds = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts * 2]
        check(llm.engine.scheduler.memory)
        llm.close()
        return texts(rounds)

    llm = start(tmp_path / "cache", **scarce)
    expected = served(llm)
    # What the host tier writes back is there.
    assert (LateCopy.num_put_off > 5) == (policy == "write_through")
    assert disk_stats(llm).num_saved > 10
    again = start(tmp_path / "cache", **scarce)
    assert served(again) == expected
    assert disk_stats(again).num_hits > 5
    assert disk_stats(again).num_damaged == 0


@pytest.mark.slow
def test_another_process_finds_what_this_one_wrote_through(tmp_path: Path) -> None:
    """Two processes at once: the second finds what the first, which goes on, has computed."""
    llm = start(tmp_path, num_kv_blocks=None, max_model_len=None, prefix_cache_write_policy="write_through")
    (mine,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    stores = llm.engine._disk_prefetch
    assert stores is not None
    stores._disk.touch(())  # once all queued writes are done
    assert disk_stats(llm).num_saved > 5
    command = [sys.executable, "-m", "quire", "generate", "--prefix-cache-dir", str(tmp_path), "--json"]
    command += ["--temperature", "0", "--max-tokens", "8", "--block-size", "8", "--prompt", PROMPTS[0]]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    other = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)
    assert other["num_disk_tokens"] == other["num_cached_tokens"] > 40
    assert other["outputs"][0]["text"] == mine.outputs[0].text
    llm.close()


def test_slow_disks_are_only_tried_now_and_then(tmp_path: Path, expected: list[str]) -> None:
    llm = start(tmp_path / "cache")
    assert expected
    run(llm)
    num_hits = disk_stats(llm).num_hits
    # An impossibly fast processor: loading never wins, and is tried at a fixed interval.
    llm.engine.step_recorder.record_prefill(10**15, 1, 1e-6)
    assert num_hits > 0
    llm.engine.scheduler.memory.reset_prefix_cache()
    for number in range(1, 2 * REFUSALS + 1):
        output = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]
        assert output.num_disk_tokens == (0 if number % REFUSALS else output.num_cached_tokens)
        llm.engine.scheduler.memory.reset_prefix_cache()
    assert disk_stats(llm).num_hits > num_hits
    llm.close()
