"""The memory that oneDNN's primitive cache keeps for products of many shapes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from quire.ops.pytorch.torch_ops import packing_works

# Resident MiB that products of 1,000 different numbers of rows leave behind.
PROGRAM = """
import torch
from quire.ops.pytorch.torch_ops import PackedLinear

def resident():
    with open("/proc/self/status") as status:
        return int(status.read().partition("VmRSS:")[2].split()[0]) >> 10

with torch.inference_mode():
    linear = PackedLinear(torch.randn(64, 64), None)
    linear(torch.randn(1, 64))
    before = resident()
    for num_rows in range(2, 1002):
        linear(torch.randn(num_rows, 64))
    print(resident() - before)
"""


def resident_after(**environment: str) -> int:
    env = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_CAPACITY")} | environment
    run = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    return int(run.stdout)


@pytest.mark.skipif(not packing_works(torch.float32) or sys.platform != "linux", reason="weights are not packed here")
@pytest.mark.slow
def test_steps_of_many_lengths_leave_bounded_memory_behind() -> None:
    assert resident_after() < 120
    unbounded = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    assert resident_after(**unbounded) > 250, "the environment overrides the bound, and the bound is needed"
