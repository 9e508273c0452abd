"""Engines to simulate: on named hardware, and from files of measured steps."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.llm import LLM
from quire.errors import ConfigError
from quire.measurement.bench import step_probe
from quire.measurement.bench.hardware import HARDWARE, RooflineStepTime
from quire.measurement.bench.roofline import AttentionShape, ModelShape, step_work
from quire.measurement.bench.simulated_engine import engine_of_step_times, engine_on_hardware, step_times_json
from quire.measurement.bench.step_probe import StepProbe
from quire.measurement.bench.workloads import BenchRequest
from quire.measurement.simulation.replicas.fit import quality_of
from quire.measurement.simulation.replicas.step_time import StepItem
from quire.memory.recording.settings import MemorySettings
from quire.memory.specs import FullAttention
from tests.models.published import CONFIGS
from tests.simulation.fleets import step_time


def written(folder: Path, name: str) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    return str(path)


# Of 322 short sequences, the operations of a step take about as long as its reads; of 1,500, longer.
@pytest.mark.parametrize("num_sequences", [1, 5, 200, 322, 1500])
def test_ends_of_decoding_steps_are_those_of_the_steps_of_a_roofline(num_sequences: int, tmp_path: Path) -> None:
    model = engine_on_hardware({"model": written(tmp_path, "Qwen3 8B")}, "l4").step_time
    rng = random.Random(num_sequences)
    starts = [rng.randrange(1, 5000 if num_sequences < 300 else 20) for _ in range(num_sequences)]
    ends, end_s = [], 7.5
    for step in range(20):
        end_s += model.of_step([StepItem(start + step, 1, 1) for start in starts])
        ends.append(end_s)
    assert model.is_additive
    assert model.decode_ends(7.5, num_sequences, sum(starts), 0, 20) == ends


def test_the_work_of_steps_without_windows_is_that_of_the_roofline() -> None:
    late = AttentionShape(8, 4, 16, None)
    shapes = ((AttentionShape(4, 2, 8, None), 3), (AttentionShape(6, 1, 8, None), 2))
    model = ModelShape(1000, 300, 200, 2, (1.5, 2.0), shapes, ((late, 1),), state_bytes=70, num_state_values=9)
    step_time, rng = RooflineStepTime(model, HARDWARE["l4"]), random.Random(1)
    assert step_time.is_additive
    for _ in range(50):
        parts = []
        for _ in range(rng.randrange(1, 9)):
            count = rng.choice((1, 1, 1, rng.randrange(1, 300)))
            parts.append(StepItem(rng.choice((0, rng.randrange(900))), count, rng.randrange(count + 1)))
        assert step_time._additive_work(parts) == step_work(model, parts)


def test_a_step_of_a_known_model_takes_about_what_others_measured(tmp_path: Path) -> None:
    # SGLang's published 142.7 tokens a second for Qwen3-8B on an H100, one sequence.
    model = engine_on_hardware({"model": written(tmp_path, "Qwen3 8B")}, "h100").step_time
    assert model.of_step([StepItem(1024, 1, 1)]) == pytest.approx(1 / 142.7, rel=0.1)


def test_several_machines_add_up(tmp_path: Path) -> None:
    options = {"model": written(tmp_path, "Llama 3.1 70B")}
    with pytest.raises(ConfigError, match="weights") as caught:
        engine_on_hardware(options, "h100")
    assert caught.value.field == "gpus"
    four, eight = (engine_on_hardware(options, "h100", count) for count in (4, 8))
    parts = [StepItem(0, 2048, 1)]
    assert eight.step_time.of_step(parts) < 0.6 * four.step_time.of_step(parts)
    assert eight.num_bytes > 2 * four.num_bytes


def test_windows_are_not_additive() -> None:
    shape = ModelShape(880, 0, 300, 2, (2, 2), ((AttentionShape(4, 2, 8, 10), 2),))
    assert not RooflineStepTime(shape, HARDWARE["l4"]).is_additive


def test_the_memory_is_that_of_the_engine() -> None:
    options: dict[str, Any] = {"num_kv_blocks": 77, "max_model_len": 300, "swap_space": 1 << 20, "watermark": 0.1}
    settings = engine_on_hardware({"model": "bundled"}, "cpu").settings(options)
    llm = LLM("bundled", num_threads=1, skip_tokenizer_init=True, **options)
    try:
        real = llm.engine.scheduler.memory
        mine = settings.memory.build()
        assert [group.spec for group in mine.groups] == [group.spec for group in real.groups]
        assert mine.usage() == real.usage()
        assert mine.watermark == real.watermark
        assert settings.max_num_batched_tokens == llm.engine.scheduler.max_num_batched_tokens
        assert settings.max_num_seqs == llm.engine.scheduler.max_num_seqs
    finally:
        llm.close()


def test_steps_are_measured_fitted_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_probe, "DECODING", (1, 4))
    monkeypatch.setattr(step_probe, "PROMPTS", (16, 64))
    monkeypatch.setattr(step_probe, "CONTEXTS", ((2, 128),))
    monkeypatch.setattr(step_probe, "SHARED", ((3, 64),))
    monkeypatch.setattr(step_probe, "NUM_MIXED", 4)
    # A clock that tells the work: the sum of what the steps did so far.
    moments = iter(range(1 << 30))
    options = {"model": "bundled", "num_threads": 1, "skip_tokenizer_init": True, "num_kv_blocks": 256}
    probe = StepProbe(EngineConfig.from_options(**options, max_num_seqs=8), lambda: float(next(moments)))
    try:
        probe.measure()
        shared = [part for step in probe.steps for part in step.parts if part.num_shared]
        assert {part.num_shared for part in shared} == {64}
        assert all(step.seconds == 1.0 for step in probe.steps)
        known = len(probe.steps)
        times = probe.time([BenchRequest([1, 2, 3], 4), BenchRequest([4, 5], 2)])
        assert [len(each) for each in times] == [4, 2]
        assert len(probe.steps) == known
        model, quality = probe.fit()
        assert quality == quality_of(model, probe.steps)
        assert quality.p90_error < 1e-6
        path = tmp_path / "steps.json"
        path.write_text(probe.as_json("a test", model, quality))
    finally:
        probe.close()
    engine = engine_of_step_times(str(path))
    assert engine.name == "a test"
    settings = engine.settings({})
    assert settings.memory.build().usage().free == 256
    assert settings.max_num_seqs == 8
    assert engine.step_time.of_step([StepItem(5, 1, 1)]) == pytest.approx(1.0)
    # The bytes stay where the blocks are other.
    assert engine.settings({"block_size": 32}).memory.build().usage().free == 127


def content() -> dict[str, Any]:
    memory = MemorySettings(specs=(FullAttention(block_size=16),), num_bytes=64 * 100)
    made: dict[str, Any] = json.loads(step_times_json("a test", step_time(), {}, {"block_size": 16}, memory))
    return made


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"version": 2}, "version"),
        ({"version": "1"}, "version"),
        ({"name": None}, "name"),
        ({"coefficients": {"step": 1.0}}, "cached_tokens"),
        ({"engine": {"block_size": 0}}, "block_size"),
        ({"engine": {"nonsense": 0}}, "nonsense"),
        ({"memory": {}}, "memory"),
        ({"memory": {"specs": [{"kind": "odd"}], "num_bytes": 100}}, "memory"),
        ({"memory": {"specs": [], "num_bytes": 100}}, "memory"),
    ],
)
def test_a_wrong_file_of_step_times_is_refused(changes: dict[str, Any], field: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({**content(), **changes}))
    with pytest.raises(ConfigError) as caught:
        engine_of_step_times(str(path))
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 10000, "\ud800"])
def test_a_file_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError, match="step_times"):
        engine_of_step_times(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        engine_of_step_times(str(tmp_path / "none"))
