"""The settings of the C allocator."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from quire.platform.malloc import keep_freed_memory

# In a process of its own: page faults of many short-lived tensors of 8 MiB, with and without the setting. The allocator
# keeps the threshold that it starts with: when it would learn from what is freed depends on the heap's layout.
UNLEARNED = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
MEASURE = """
import resource, sys, torch
from quire.platform.malloc import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
torch.empty(1 << 20).add_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    tensors = [torch.empty(1 << 21).add_(1) for _ in range(4)]
    del tensors
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.slow
def test_freed_memory_is_not_faulted_in_again() -> None:
    def faults(mode: str) -> int:
        command = [sys.executable, "-c", MEASURE, mode]
        environment = os.environ | UNLEARNED
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    assert faults("kept") < 0.2 * faults("plain")


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "other")
    assert keep_freed_memory() is False
