"""Construction of transformers' modules, under a default dtype that is the whole process's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest
import torch

from quire.errors import CheckpointError
from quire.models.hosted.build import build_module
from tests.hosted.filled import new_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def config_of(model_type: str, architecture: str) -> dict[str, Any]:
    return {**new_config(model_type).to_dict(), "architectures": [architecture], "model_type": model_type}


def test_a_construction_that_fails_leaves_the_default_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def fail(*_: Any) -> None:
        seen.append(torch.get_default_dtype())
        raise ValueError("no such layer")

    modeling = import_module("transformers.models.llama.modeling_llama")
    monkeypatch.setattr(modeling.LlamaMLP, "__init__", fail)
    config = {**new_config("olmo2").to_dict(), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    with pytest.raises(CheckpointError, match="no such layer"):
        build_module(config, dtype=torch.bfloat16)
    assert seen == [torch.bfloat16]
    assert torch.get_default_dtype() is torch.float32


def test_constructions_in_several_threads_do_not_change_each_others_dtype() -> None:
    config = config_of("olmo2", "Olmo2ForCausalLM")

    def dtypes_of(dtype: torch.dtype) -> set[torch.dtype]:
        return {parameter.dtype for parameter in build_module(config, dtype=dtype).parameters()}

    wanted = [*DTYPES, *reversed(DTYPES)] * 2
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(dtypes_of, wanted)) == [{dtype} for dtype in wanted]
    assert torch.get_default_dtype() is torch.float32
