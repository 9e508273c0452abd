"""Files as they are served lose no more than docs/lab/real-files.md says, beside exact values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.config import EngineConfig
from quire.measurement.bench.divergence import DivergenceTally
from quire.measurement.bench.exact_ops import ExactOps
from quire.measurement.bench.quality import QualityBench, ReadingEngine, exact_config
from quire.measurement.bench.quality_text import read_quality_text
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.real.models import files, files_with_twins, twin_of

# Mean KL divergences in nats, over 3,445 positions of Gemma 3 270M in Q4_K_M.
OF_FILES: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.0040),
    "float32": ({"dtype": "float32"}, 0.0035),
    "float32, torch": ({"dtype": "float32", "kernels": "torch"}, 0.0035),
}
OF_TWINS: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({}, 0.0015),
    "KV float16": ({"kv_cache_dtype": "float16"}, 0.0015),
    "KV int8": ({"kv_cache_dtype": "int8"}, 0.008),
    "KV fp8": ({"kv_cache_dtype": "fp8"}, 0.008),
    "int8": ({"quantization": "int8"}, 0.0040),
    "int8, float32": ({"quantization": "int8", "dtype": "float32"}, 0.0037),
}


def divergence(model: Path, reference: Path, options: dict[str, Any]) -> float:
    """Return the mean KL divergence of a form from the exact values of a checkpoint."""
    bench = QualityBench(EngineConfig.from_options(model=str(model), **options), str(reference))
    try:
        found = bench.divergence()
    finally:
        bench.close()
    assert found.num_positions >= 2000
    return found.kl_mean


@pytest.mark.parametrize("file", files(), ids=lambda file: file.stem)
@pytest.mark.parametrize("name", OF_FILES)
def test_a_file_is_near_its_exact_values(file: Path, name: str) -> None:
    options, most = OF_FILES[name]
    assert divergence(file, file, options) <= most


@pytest.mark.parametrize("file", files_with_twins(), ids=lambda file: file.stem)
@pytest.mark.parametrize("name", OF_TWINS)
def test_the_same_weights_in_16_bits_are_near_them(file: Path, name: str) -> None:
    options, most = OF_TWINS[name]
    assert divergence(twin_of(file), file, {"dtype": "bfloat16", **options}) <= most


@pytest.mark.parametrize("file", files_with_twins(), ids=lambda file: file.stem)
def test_exact_values_are_those_of_transformers(file: Path) -> None:
    config = EngineConfig.from_options(model=str(file))
    tokenizer = Tokenizer.from_folder(twin_of(file))
    sequences = read_quality_text(tokenizer, None, 256, 800)
    tokenizer.close()
    model: Any = AutoModelForCausalLM.from_pretrained(twin_of(file), dtype=torch.float32).eval()
    engine = ReadingEngine(exact_config(config), lambda _: ExactOps(1 << 32))
    tally = DivergenceTally()
    try:
        for ids in sequences:
            hidden = engine.hidden(ids)
            with torch.inference_mode():
                expected = model(torch.tensor([ids])).logits[0, :-1]
            tally.add(engine.logits(hidden[:-1]), expected, torch.tensor(ids[1:]))
    finally:
        engine.close()
    found = tally.result()
    assert abs(found.kl_mean) < 1e-6
    assert found.kl_max < 1e-4
