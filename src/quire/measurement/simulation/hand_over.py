"""The split of prefill and decoding in a fleet: one replica computes a prompt, another one continues.

```
 prefill replica   [ prompt ][ 1 token ] --.  the prompt's published blocks that the other one lacks
                                            '-- link --> [ last tokens of the prompt ][ all new tokens ]  decode replica
```

The blocks are handed over by commands of the memory manager, through the host tier; blocks that have no room there, or
were evicted, are computed again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.config.cache import STAGING_BYTES
from quire.errors import ConfigError, shown
from quire.measurement.simulation.replicas.replica import NAMESPACE, EngineReplica
from quire.measurement.simulation.replicas.replica_settings import ReplicaSettings
from quire.measurement.simulation.replicas.tokens import TokenTable
from quire.measurement.simulation.request import SimulatedRequest
from quire.memory.results import FetchedBlock, StoredBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSplit:
    """The split of a fleet, and the links between its replicas.

    Args:
        num_prefill: number of replicas, the first ones, that compute prompts; the others continue them.
        bytes_per_s: bandwidth of the link into a decode replica, which transfers one hand-over after the other.
        latency_s: seconds of a hand-over in addition to the transfer of its bytes.

    Raises:
        ConfigError: a value is outside its range.
    """

    num_prefill: int
    bytes_per_s: float = 12.5e9
    latency_s: float = 0.001

    def __post_init__(self) -> None:
        if type(self.num_prefill) is not int or self.num_prefill < 1:
            raise ConfigError(
                f"prefill_replicas must be a whole number of at least 1, got {shown(self.num_prefill)}",
                field="prefill_replicas",
            )
        for name, value, least in (
            ("transfer_bytes_per_s", self.bytes_per_s, 1),
            ("transfer_latency_s", self.latency_s, 0),
        ):
            if type(value) not in (int, float) or not math.isfinite(value) or value < least:
                raise ConfigError(f"{name} must be a number of at least {least}, got {shown(value)}", field=name)


def split_settings(settings: ReplicaSettings) -> ReplicaSettings:
    """Return the options of replicas that hand blocks over: with a host tier, as in a real engine."""
    memory = settings.memory
    if not memory.enable_prefix_caching:
        raise ConfigError("prefill_replicas needs enable_prefix_caching, which is off", field="prefill_replicas")
    host_bytes = memory.host_bytes or STAGING_BYTES
    return replace(settings, memory=replace(memory, has_disk=True, host_bytes=host_bytes))


class HandedRequest:
    """A request on its way between two replicas, with its exported blocks."""

    __slots__ = ("blocks", "num_cached", "replica", "request")

    def __init__(
        self, request: SimulatedRequest, replica: int, blocks: frozenset[StoredBlock], num_cached: int
    ) -> None:
        self.request = request
        self.replica = replica
        self.blocks = blocks
        self.num_cached = num_cached


class Links:
    """The links into the decode replicas."""

    def __init__(self, split: PrefillSplit) -> None:
        self.num_bytes = 0
        self._split = split
        # Replica -> time at which its link is free.
        self._free_s: dict[int, float] = {}

    def send(self, replica: int, num_bytes: int, now_s: float) -> float:
        """Send bytes, and return the time of their arrival."""
        start_s = max(now_s, self._free_s.get(replica, now_s))
        end_s = self._free_s[replica] = start_s + num_bytes / self._split.bytes_per_s
        self.num_bytes += num_bytes
        return end_s + self._split.latency_s


def exported_blocks(replica: EngineReplica, request: SimulatedRequest, table: TokenTable) -> frozenset[StoredBlock]:
    """Return the blocks of a prompt that a replica has published and can export."""
    memory = replica.memory
    assert memory.archive is not None, "see split_settings"
    tokens = table.token_ids(request.prompt)
    chain = memory.chain(tokens, NAMESPACE)
    return frozenset(memory.archive.exporting_ops(chain, len(tokens) // memory.block_size, lambda _: True).saves)


def lacking_bytes(
    replica: EngineReplica,
    request: SimulatedRequest,
    table: TokenTable,
    blocks: frozenset[StoredBlock],
    now_s: float,
) -> int:
    """Return the bytes of the blocks that a prompt's longest hit needs and that a replica does not have."""
    replica.settle(now_s)
    memory = replica.memory
    assert memory.archive is not None, "see split_settings"
    chain = memory.chain(table.token_ids(request.prompt), NAMESPACE)
    loads = memory.archive.find_loads(chain, blocks.__contains__).loads
    return sum(memory.groups[load.block.group_idx].spec.bytes_per_block for load in loads)


def receive_blocks(replica: EngineReplica, handed: HandedRequest, table: TokenTable, now_s: float) -> None:
    """Publish the blocks of a prompt that have arrived at a replica, if its host tier has room."""
    replica.settle(now_s)
    memory = replica.memory
    assert memory.archive is not None, "see split_settings"
    chain = memory.chain(table.token_ids(handed.request.prompt), NAMESPACE)
    plan = memory.archive.find_loads(chain, handed.blocks.__contains__)
    fetched = [FetchedBlock(load.block.group_idx, load.block_idx, ticket) for ticket, load in enumerate(plan.loads)]
    memory.archive.publish_loaded(chain, plan.num_blocks, fetched)
