"""Ranks on two hosts whose own names are loopback addresses: where they listen, and what the user may say of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.distributed.two_hosts import ADDRESSES, INTERFACES, NAMES, on_two_hosts
from tests.engine.test_ranks import GREEDY, OPTIONS, PROMPTS

ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
CONNECT = """
import json, os, sys
import torch
from quire.config import ParallelConfig
from quire.distributed.torchrun import TorchrunPlace, join_torchrun
joins, rank = json.loads(sys.argv[1]), int(sys.argv[2])
for master, port, stages, interfaces in joins:
    os.environ.update(MASTER_ADDR=master, MASTER_PORT=str(port), GLOO_SOCKET_IFNAME=interfaces[rank])
    sizes = {"pipeline_parallel_size" if stages else "tensor_parallel_size": 2}
    try:
        config = ParallelConfig(**sizes, distributed_timeout_s=20)
        ranks = join_torchrun(config, TorchrunPlace(rank, 2, 0, 1, master), lambda links: None)
        total = ranks.group.all_reduce(torch.tensor([float(rank + 1)]))
        print(json.dumps(["joined", float(total[0])]), flush=True)
        ranks.expect_end()
        ranks.close()
    except Exception as error:
        print(json.dumps([type(error).__name__, str(error)]), flush=True)
"""


def test_ranks_connect_by_the_addresses_of_their_connection(tmp_path: Path) -> None:
    """By the first host's name, which it resolves to a loopback address itself, by its address, and by interfaces."""
    none, both = ["", ""], [*INTERFACES]
    joins: list[list[Any]] = [
        [NAMES[0], 29501, False, none],
        [ADDRESSES[0], 29502, False, none],
        [NAMES[0], 29503, True, none],
        [NAMES[0], 29504, False, both],
        [NAMES[0], 29505, False, ["", INTERFACES[1]]],
        [NAMES[0], 29506, False, ["", "cable7"]],
        [NAMES[0], 29507, False, ["cable7", ""]],
    ]
    outputs = on_two_hosts(CONNECT, [json.dumps(joins)], tmp_path, ENVIRONMENT)
    told = [[json.loads(line) for line in output.splitlines()] for output in outputs]
    for rank in range(2):
        assert told[rank][:5] == [["joined", 3.0]] * 5
        for failed, (kind, message) in zip((1, 0), told[rank][5:], strict=True):
            assert kind == "ConfigError"
            assert "GLOO_SOCKET_IFNAME must name interfaces of this host" in message
            assert message.startswith("rank") == (rank != failed)
            assert "got 'cable7', which does not exist" in message
            assert INTERFACES[failed] in message


GENERATE = """
import sys, os
from quire import LLM, SamplingParams
options, prompts, rank = eval(sys.argv[1]), eval(sys.argv[2]), int(sys.argv[3])
os.environ.update(MASTER_ADDR="node-one", MASTER_PORT="29501", RANK=str(rank), WORLD_SIZE="2")
print("started", flush=True)
with LLM("bundled", **options) as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True), use_tqdm=False)
    print([output.outputs[0].token_ids for output in outputs])
"""


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["ranks", "stages"])
def test_a_model_on_two_hosts_gives_the_tokens_of_one(sizes: dict[str, int], tmp_path: Path) -> None:
    options = {"num_kv_blocks": 40, **OPTIONS}
    first, _ = on_two_hosts(GENERATE, [repr({**options, **sizes}), repr(PROMPTS)], tmp_path, ENVIRONMENT)
    with LLM("bundled", **options) as one:
        expected = [output.outputs[0].token_ids for output in one.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert first == f"started\n{expected}\n"
