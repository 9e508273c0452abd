"""Stages that ranks share: tokens, what each rank loads, and the end of a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputs
from quire.errors import ConfigError, RankFailed, WorkerError
from tests.distributed.engines import llm_of_threads
from tests.distributed.in_threads import native_library
from tests.engine.test_ranks import GREEDY, OPTIONS, PROMPTS, WAIT_S, children, serve_until_it_fails, texts
from tests.kvstore.servers import free_port

SCARCE: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
    "num_kv_blocks": 20,
    "swap_space": 1 << 20,
    "preemption_mode": "swap",
}
SAMPLES = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=56, repetition_penalty=1.2, logprobs=2, top_p=0.9)


def start(**options: Any) -> LLM:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    return LLM("bundled", **{**sizes, "num_kv_blocks": 40, **OPTIONS, **options})


def test_two_stages_of_two_ranks_give_what_one_process_gives() -> None:
    """Digests of all ranks' plans are compared in each step."""
    options = {**OPTIONS, **SCARCE}
    logprobs = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=1, ignore_eos=True)
    with LLM("bundled", **options) as one, llm_of_threads(size=2, stages=2, **options) as four:
        assert texts(four, logprobs) == texts(one, logprobs)
        # Prefixes are cached now, and requests are aborted in flight.
        stream: Any = four.stream(PROMPTS, GREEDY)
        next(stream)
        stream.close()
        assert texts(four, logprobs) == texts(one, logprobs)
        assert four.usage().used == 0


@pytest.mark.parametrize(
    "microbatches", [pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.exhaustive)]
)
def test_features(microbatches: int) -> None:
    regex = StructuredOutputs(regex="[a-c]{3} [0-9]{4}")
    every = (
        GREEDY,
        SAMPLES,
        SamplingParams(beam_width=3, n=2, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=regex),
        SamplingParams(temperature=0.0, max_tokens=60, stop=("the", ".")),
    )
    options = {**OPTIONS, **SCARCE}
    staged: dict[str, Any] = {"size": 2, "stages": 2, "pipeline_microbatches": microbatches}
    with LLM("bundled", **options) as one, llm_of_threads(**staged, **options) as four:
        for params in every:
            assert texts(four, params) == texts(one, params)
        assert four.stats.num_preemptions > 0


def test_each_rank_reads_its_part_of_its_own_layers() -> None:
    def sizes(llm: LLM) -> dict[str, int]:
        executor: Any = llm.engine.executor
        runner = getattr(executor, "_inner", executor)._runner
        return {name: slot.shape[0] * slot.shape[-1] for name, slot in runner._decoder.weights.slots.items()}

    def layers(of: dict[str, int]) -> int:
        return len({name.split(".")[1] for name in of if name.startswith("layers.")})

    with LLM("bundled", num_kv_blocks=40, **OPTIONS) as one:
        whole = sizes(one)
    with llm_of_threads(size=2, stages=2, num_kv_blocks=40, max_model_len=256) as four:
        own = sizes(four)
    assert 0 < layers(own) < layers(whole)
    kinds = {name.split(".", 2)[2]: size for name, size in whole.items() if name.startswith("layers.")}
    for name, size in own.items():
        if name.startswith("layers.") and name.endswith(("qkv.weight", "output.weight", "gate_up.weight")):
            assert 2 * size == kinds[name.split(".", 2)[2]]


def test_numbers_of_ranks_that_do_not_divide_a_stage_are_refused_and_leave_no_process() -> None:
    before = children()
    with pytest.raises(ConfigError, match="tensor_parallel_size must divide") as refused:
        start(tensor_parallel_size=7)
    assert refused.value.field == "tensor_parallel_size"
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size must be at most .* got 32") as refused:
        start(pipeline_parallel_size=32)
    assert refused.value.field == "pipeline_parallel_size"
    assert children() == before


# The rank beside rank 0, and one of the first stage: they wait for others in different places.
@pytest.mark.parametrize(
    ("backend", "rank", "when"),
    [
        pytest.param("shared_memory", 1, "stepping", marks=pytest.mark.slow),
        *(
            pytest.param(backend, *place, marks=pytest.mark.exhaustive)
            for backend, place in (
                ("shared_memory", (3, "stepping")),
                ("shared_memory", (1, "idle")),
                ("gloo", (1, "stepping")),
                ("gloo", (3, "stepping")),
                ("gloo", (1, "idle")),
            )
        ),
    ],
)
def test_a_killed_rank_ends_the_engine_with_its_name(backend: str, rank: int, when: str) -> None:
    native_library()
    llm = start(all_reduce_backend=backend)
    assert llm.engine.ranks is not None
    processes = llm.engine.ranks.process_ids
    stream: Any = llm.stream(PROMPTS, GREEDY)
    next(stream)
    if when == "idle":
        stream.close()
    os.kill(processes[rank - 1], signal.SIGKILL)
    with pytest.raises(RankFailed, match=rf"rank {rank} \(process \d+\) was ended by SIGKILL") as failed:
        serve_until_it_fails(llm, stream)
    assert failed.value.rank == rank
    with pytest.raises(WorkerError):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()
    assert not {*children()} & {*processes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_nodes", "backend", "transport"),
    [
        (2, "auto", "gloo"),
        pytest.param(2, "shared_memory", "gloo", marks=pytest.mark.exhaustive),
        pytest.param(2, "gloo", "gloo", marks=pytest.mark.exhaustive),
        pytest.param(1, "auto", "shared memory", marks=pytest.mark.exhaustive),
    ],
)
def test_torchrun_starts_the_ranks(num_nodes: int, backend: str, transport: str) -> None:
    """Two nodes of two ranks each are as two hosts: sums are in shared memory, all else goes over sockets."""
    native_library()
    program = (
        "from quire import LLM, SamplingParams\n"
        "with LLM('bundled', tensor_parallel_size=2, pipeline_parallel_size=2, num_kv_blocks=40,"
        f" all_reduce_backend={backend!r}, **{OPTIONS!r}) as llm:\n"
        f"    outputs = llm.generate({PROMPTS!r}, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))\n"
        "    group = llm.engine.ranks.group\n"
        "    names = group.transport.name, group.tensor.transport.name\n"
        "    print([output.outputs[0].token_ids for output in outputs], *names, sep=' / ')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--no-python", "--nproc-per-node", str(4 // num_nodes)]
    address = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    nodes = [
        subprocess.Popen(
            [*command, "--nnodes", str(num_nodes), "--node-rank", str(node), *address, sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(num_nodes)
    ]
    outputs = [node.communicate(timeout=5 * WAIT_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0] * num_nodes, outputs
    with LLM("bundled", num_kv_blocks=40, **OPTIONS) as one:
        expected = [output.outputs[0].token_ids for output in one.generate(PROMPTS, GREEDY, use_tqdm=False)]
    sums = "gloo" if backend == "gloo" else "shared memory"
    assert outputs[0][0].strip().endswith(f"{expected} / {transport} / {sums}")
