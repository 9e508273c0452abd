"""The options of a simulated replica."""

from __future__ import annotations

from dataclasses import dataclass

from quire.memory.recording.settings import MemorySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The options of a replica; see `MemorySettings` and `Scheduler`.

    Args:
        memory: settings of the memory manager.
        copy_bytes_per_s: rate of copies between the device and the host.
    """

    memory: MemorySettings
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    policy: str = "fcfs"
    priority_aging: int = 256
    preemption_policy: str = "last"
    preemption_mode: str = "auto"
    copy_bytes_per_s: float = 20e9
