"""GGUF files of random blocks: models of every shape are read and give finite logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gguf_shapes import SHAPES
from benchmarks.make_gguf import write
from benchmarks.make_model import QWEN3
from quire import LLM, SamplingParams

SMALL = {"num_hidden_layers": 4, "vocab_size": 512, "num_experts": 8}
MODELS = {"qwen3-0.6b": QWEN3, **SHAPES}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_each_shape_is_served(name: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {key: SMALL.get(key, value) for key, value in MODELS[name].items()}
    path = write(tmp_path / "model.gguf", "q4_k_m", config)
    with LLM(str(path), skip_tokenizer_init=True, max_model_len=64) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=1, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([[5, 6, 7, 8]], params)
    assert output.error is None
    assert len(output.outputs[0].token_ids) == 4
