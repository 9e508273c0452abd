"""A GPU that fails for good ends the engine at the first step that notices, so that a supervisor starts it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import DeviceFailed
from tests.conformance.checkpoints import save_checkpoint

PROMPTS = [{"prompt_token_ids": [5, 6, 7, number]} for number in range(8, 11)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
FAULT = "CUDA error: an illegal memory access was encountered"


class Gpu:
    """The part of CUDA that tells of a fault; the computation is on a CPU.

    Attributes:
        has_failed: True once every call gives an error.
    """

    has_failed = False

    def query(self) -> bool:
        if self.has_failed:
            raise RuntimeError(FAULT)
        return True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu)
    return gpu


@pytest.mark.parametrize("is_lost", [True, False], ids=["for good", "once"])
@pytest.mark.parametrize("part", ["sampler", "decoder"])
@pytest.mark.parametrize("is_async", [False, True], ids=["step by step", "ahead"])
def test_a_gpu_that_has_failed(
    part: str, is_lost: bool, is_async: bool, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether rows are sampled or layers computed, a fault is none of a request alone, nor one that may pass."""
    folder = str(save_checkpoint("llama3", tmp_path))
    with LLM(model=folder, skip_tokenizer_init=True, dtype="float32", async_scheduling=is_async) as llm:
        usual = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
        runner: Any = llm.engine.executor
        runner = runner._runner
        owner, name = (runner._sampler, "sample") if part == "sampler" else (runner, "_compute")
        inner, num_calls = getattr(owner, name), 0

        def fails(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            gpu.has_failed = gpu.has_failed or (is_lost and num_calls == 2)
            if gpu.has_failed or num_calls == 2:
                raise RuntimeError(FAULT)
            return inner(*arguments, **options)

        monkeypatch.setattr(owner, name, fails)
        if is_lost:
            with pytest.raises(DeviceFailed, match=r"the GPU cannot be used any more .*illegal memory access"):
                llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert num_calls == 2, "nothing is tried after it"
            return
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        if part == "sampler":
            assert [output.outputs[0].token_ids for output in outputs] == usual, "each was sampled by itself"
        else:
            assert all("illegal memory access" in str(output.error) for output in outputs)
