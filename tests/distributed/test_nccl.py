"""Two ranks on two GPUs; none of these tests has run yet, for want of a machine with two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, SamplingParams
from quire.errors import RankFailed
from quire.execution.runners.runner import ModelRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PROMPTS = ["Once upon a time", "The old sailor", "Tom found a red kite and Once upon a time", "A"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 256, "num_kv_blocks": 40}
NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def test_sums_have_the_bits_of_gloo(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-m", "tests.distributed.nccl_rank", str(rank), "2", str(tmp_path / "store")])
        for rank in range(2)
    ]
    assert [rank.wait(300) for rank in ranks] == [0, 0]


@pytest.mark.parametrize("backend", ["nccl", "shared_memory", "gloo"])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=NEEDS_TRITON)])
def test_two_gpus_give_the_tokens_of_one(kernels: str, backend: str) -> None:
    found = []
    for options in ({}, {"tensor_parallel_size": 2, "all_reduce_backend": backend}):
        with LLM("bundled", **OPTIONS, kernels=kernels, **options) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            runner: Any = getattr(llm.engine.executor, "_inner", llm.engine.executor)
            if kernels == "triton" and backend == "nccl":
                assert isinstance(runner._runner, ModelRunner)
                assert runner._runner.captured.num_replayed > 0
    assert found[0] == found[1]


def generate_until_it_fails(llm: LLM) -> None:
    for _ in range(1000):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("when", ["stepping", "idle"])
def test_a_killed_rank_ends_the_engine_with_its_name(when: str) -> None:
    llm = LLM("bundled", **OPTIONS, tensor_parallel_size=2)
    assert llm.engine.ranks is not None
    (process,) = llm.engine.ranks.process_ids
    stream: Any = llm.stream(PROMPTS, GREEDY)
    next(stream)
    if when == "idle":
        stream.close()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
        generate_until_it_fails(llm)
    llm.close()


def test_a_rank_that_lives_and_does_not_answer_ends_the_engine() -> None:
    llm = LLM("bundled", **OPTIONS, tensor_parallel_size=2, distributed_timeout_s=5.0)
    assert llm.engine.ranks is not None
    (process,) = llm.engine.ranks.process_ids
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    os.kill(process, signal.SIGSTOP)
    with pytest.raises(RankFailed, match="rank 1"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()
