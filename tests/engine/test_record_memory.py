"""The recorded memory commands of a running engine replay to the same block ids."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, SamplingParams
from quire.errors import ConfigError
from quire.memory.invariants import check
from quire.memory.manager import KVCacheManager
from quire.memory.recording.recorder import MemoryRecorder
from quire.memory.recording.replay import Report, replay
from tests.conformance.checkpoints import ragged_prompts, save_checkpoint

STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "
PROMPTS = [
    STORY * 2 + "Then",
    "Tom",
    STORY + "But",
    STORY * 2 + "Then the fox",
    "The old sailor",
    STORY + "The next day",
]


def load(**options: Any) -> LLM:
    """Load the bundled model with a pool so small that sequences are preempted."""
    return LLM(**({"num_threads": 1, "num_kv_blocks": 40, "max_model_len": 160, "block_size": 4} | options))


def replayed(path: Path) -> Report:
    with path.open(encoding="utf-8") as log:
        report = replay(log)
    assert report.fault is None
    return report


def test_an_engine_that_swaps_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "memory.log"
    llm = load(record_memory=str(path), swap_space=2 << 20, preemption_mode="swap")
    llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=40, seed=7), use_tqdm=False)
    stats, usage = llm.engine.stats, llm.usage()
    llm.close()
    report = replayed(path)
    assert report.usage == usage
    assert report.num_commands["swap_out"] > 0
    assert report.num_commands["swap_in"] > 0
    assert stats.num_swaps > 0


def test_an_engine_under_pressure_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "memory.log"
    llm = load(record_memory=str(path))
    memory = llm.engine.scheduler.memory
    for n in (1, 3):
        llm.generate(PROMPTS, SamplingParams(n=n, max_tokens=40, seed=7), use_tqdm=False)
    check(memory)
    stats, usage = llm.engine.stats, llm.usage()
    llm.close()
    report = replayed(path)
    assert report.usage == usage
    assert report.hit_tokens == stats.prefix_hits + stats.resumed_hits
    assert min(stats.num_preemptions, stats.prefix_hits, stats.num_copies, stats.num_evictions) > 0
    assert report.num_commands["fork"] > 0
    text = path.read_text(encoding="utf-8")
    assert "fox" not in text


def test_recording_changes_no_token(tmp_path: Path) -> None:
    texts = []
    for options in ({}, {"record_memory": str(tmp_path / "memory.log")}):
        llm = load(**options)
        outputs = llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=24, seed=1), use_tqdm=False)
        texts.append([sample.text for output in outputs for sample in output.outputs])
        llm.close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("family", "num_kv_blocks"),
    [pytest.param("gemma3", 32, marks=pytest.mark.slow), pytest.param("lfm2", 40, marks=pytest.mark.slow)],
)
def test_several_cache_groups_run_again(family: str, num_kv_blocks: int, tmp_path: Path) -> None:
    path = tmp_path / "memory.log"
    folder = save_checkpoint(family, tmp_path / family)
    llm = load(
        model=str(folder),
        skip_tokenizer_init=True,
        record_memory=str(path),
        num_kv_blocks=num_kv_blocks,
        max_model_len=128,
    )
    assert len(llm.engine.scheduler.memory.groups) == 2
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    for _ in range(2):
        llm.generate(ragged_prompts(), params, use_tqdm=False)
    usage, stats = llm.usage(), llm.engine.stats
    llm.close()
    report = replayed(path)
    assert report.usage == usage
    assert len(report.usage.groups) == 2
    assert min(stats.num_preemptions, stats.prefix_hits, stats.num_evictions) > 0


def test_the_log_is_whole_after_each_step(tmp_path: Path) -> None:
    path = tmp_path / "memory.log"
    llm = load(record_memory=str(path))
    llm.engine.add_request("a", STORY, SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(5):
        llm.engine.step()
    # Nothing was closed: this is what a process that is killed leaves behind.
    report = replayed(path)
    assert report.num_commands["take_ops"] == 5
    assert report.usage.num_sequences == 1
    llm.close()
    assert replayed(path).usage.used == 0, "who was unfinished was ended"


def test_the_engine_of_a_server_closes_its_log(tmp_path: Path) -> None:
    path = tmp_path / "memory.log"

    async def serve() -> None:
        llm = AsyncLLM.from_options(num_threads=1, num_kv_blocks=40, max_model_len=160, record_memory=str(path))
        async for _ in llm.generate(STORY, SamplingParams(max_tokens=8)):
            pass
        llm.shutdown()

    asyncio.run(serve())
    assert replayed(path).usage.num_sequences == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device without room")
def test_an_unwritable_recording_warns_and_stops_without_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "memory.log"
    llm, unrecorded = load(record_memory=str(path)), load()
    params = SamplingParams(max_tokens=20, seed=3)
    memory = llm.engine.scheduler.memory
    assert isinstance(memory.tables.observer, MemoryRecorder)
    assert memory.tables.observer._log is not None
    # From here on the log's disk has no room.
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, memory.tables.observer._log.fileno())
    os.close(full)
    outputs, expected = (each.generate(PROMPTS, params, use_tqdm=False) for each in (llm, unrecorded))
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    warnings = [record.message for record in caplog.records if "recording" in record.message]
    assert len(warnings) == 1, "one warning is enough"
    assert "No space left on device" in warnings[0]
    check(memory)
    for each in (llm, unrecorded):
        each.close()
    assert replayed(path).num_commands == {}, "what was written before can be replayed"


def test_without_the_option_the_scheduler_has_the_bare_manager() -> None:
    llm = load()
    assert type(llm.engine.scheduler.memory) is KVCacheManager
    llm.close()


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "memory.log"
    path.write_text("what a crash left")
    for place in (path, tmp_path / "nowhere" / "memory.log"):
        with pytest.raises(ConfigError, match="record_memory must be a file that can be made anew") as caught:
            load(record_memory=str(place))
        assert caught.value.field == "record_memory"
    assert path.read_text() == "what a crash left"
