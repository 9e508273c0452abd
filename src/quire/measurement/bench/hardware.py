"""Rates of named machines, and a roofline model of the time of a step on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from quire.config import GIB
from quire.measurement.bench.roofline import STATE_OPERATIONS, ModelShape, Rates, StepWork, least_s, step_work
from quire.measurement.simulation.replicas.step_time import StepItem


class Hardware(NamedTuple):
    """The memory of a machine, or of one of its GPUs, and its published rates.

    Args:
        memory_bytes: size of the memory; of a GPU, the total that the driver reports.
        read_bytes_per_s: rate of memory reads.
        operations_per_s: rate of dense products in bfloat16.
        device: "cpu" or "cuda", which determines the defaults of some options.
    """

    memory_bytes: float
    read_bytes_per_s: float
    operations_per_s: float
    device: str = "cuda"


# A data sheet's gigabytes are neither 10^9 bytes nor GiB: an H200 of "141 GB" has 139.8 GiB, an L4 of "24 GB" 22.0,
# since ECC takes a part of GDDR. So the memory is the least total that CUDA reported in published out-of-memory errors
# of PyTorch ("GPU 0 has a total capacity of 139.72 GiB"); it differs by up to 0.2 GiB between drivers and boards.
HARDWARE: Mapping[str, Hardware] = {
    # NVIDIA's data sheet of the DGX B200, an eighth of it: 8 TB/s, 4,500 TFLOP/s with sparsity, half without.
    "b200": Hardware(178.35 * GIB, 8e12, 2250e12),
    # NVIDIA's data sheet of the H100 SXM: 3.35 TB/s, 1,979 TFLOP/s with sparsity, half of it without.
    "h100": Hardware(79.1 * GIB, 3.35e12, 989e12),
    # NVIDIA's data sheet of the H200 SXM: 4.8 TB/s, the same products.
    "h200": Hardware(139.72 * GIB, 4.8e12, 989e12),
    # NVIDIA's data sheet of the A100 SXM of 80 GB: 2,039 GB/s, 312 TFLOP/s.
    "a100": Hardware(79.14 * GIB, 2.039e12, 312e12),
    # NVIDIA's data sheet of the L40S: 864 GB/s, 362 TFLOP/s.
    "l40s": Hardware(44.34 * GIB, 864e9, 362e12),
    # NVIDIA's data sheet of the L4: 300 GB/s, 242 TFLOP/s with sparsity, half of it without.
    "l4": Hardware(22.03 * GIB, 300e9, 121e12),
    # A socket of AMD's EPYC 9654: 12 channels of DDR5-4800; 96 cores at 2.4 GHz with 32 products of bfloat16 a cycle.
    "cpu": Hardware(384e9, 460.8e9, 96 * 2.4e9 * 64, device="cpu"),
}

# Shares of the published rates that whole steps reach, and constant seconds of a step. SGLang's published 142.7
# tokens/s of Qwen3-8B on an H100 at one sequence are 7.0 ms a step; these values give 7.1.
READ_SHARE = 0.75
OPERATIONS_SHARE = 0.6
OVERHEAD_S = 1e-3


class RooflineStepTime:
    """Seconds of a step: the longer of its reads and its operations, plus a constant."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        count: int = 1,
        *,
        read_share: float = READ_SHARE,
        operations_share: float = OPERATIONS_SHARE,
        overhead_s: float = OVERHEAD_S,
    ) -> None:
        self._model = model
        self._rates = Rates(
            count * read_share * hardware.read_bytes_per_s, count * operations_share * hardware.operations_per_s
        )
        self._overhead_s = overhead_s
        kinds = [kind for kind, _ in (*model.attention, *model.late_attention)]
        self._is_additive = all(kind.window is None and kind.chunk is None for kind in kinds)
        # Operations for a row and a visible token, and cached values of a token: for the layers up to the last keys and
        # values, and for the layers after these.
        layers = model.attention, model.late_attention
        self._pair_operations = [sum(4 * n * kind.num_heads * kind.head_dim for kind, n in part) for part in layers]
        self._cached_values = [sum(2 * n * kind.num_kv_heads * kind.head_dim for kind, n in part) for part in layers]
        # Without windows, bytes and operations of a decoding step are sums of integers: an amount for the step, for
        # each sequence, and for each cached token.
        one, longer, two = (
            step_work(model, parts)
            for parts in ([StepItem(1, 1, 1)], [StepItem(2, 1, 1)], [StepItem(1, 1, 1), StepItem(1, 1, 1)])
        )
        self._of_cached = (longer.cache_bytes - one.cache_bytes, longer.operations - one.operations)
        self._of_sequence = (
            two.cache_bytes - one.cache_bytes - self._of_cached[0],
            two.operations - one.operations - self._of_cached[1],
        )
        self._of_rest = (
            one.weight_bytes + one.cache_bytes - self._of_sequence[0] - self._of_cached[0],
            one.operations - self._of_sequence[1] - self._of_cached[1],
        )

    @property
    def is_additive(self) -> bool:
        """True if no layer has a window or chunks."""
        return self._is_additive

    def of_step(self, parts: Sequence[StepItem]) -> float:
        """Return the seconds of a step."""
        work = self._additive_work(parts) if self._is_additive else step_work(self._model, parts)
        return least_s(work, self._rates) + self._overhead_s

    def decode_ends(
        self,
        start_s: float,
        num_sequences: int,
        num_cached: int,
        num_shared: int,  # noqa: ARG002  shared blocks count once for each sequence
        count: int,
    ) -> list[float]:
        """Return the ends of consecutive steps of one token for each sequence."""
        if not count:
            return []
        read_bytes_per_s, operations_per_s = self._rates
        overhead_s = self._overhead_s
        each_bytes, each_operations = self._of_cached
        rest_bytes, rest_operations = (
            of_rest + num_sequences * of_sequence
            for of_rest, of_sequence in zip(self._of_rest, self._of_sequence, strict=True)
        )
        first_bytes, first_operations = (
            rest_bytes + num_cached * each_bytes,
            rest_operations + num_cached * each_operations,
        )
        more_bytes, more_operations = num_sequences * each_bytes, num_sequences * each_operations
        last_bytes = first_bytes + (count - 1) * more_bytes
        last_operations = first_operations + (count - 1) * more_operations
        # The same operations in the same order as in `of_step`. Both times are linear in the index of the step: if
        # reads take longer in the first and in the last step, by more than rounding, they do in all steps.
        margin = 1 + 1e-9
        if (
            first_bytes / read_bytes_per_s > margin * (first_operations / operations_per_s)
            and last_bytes / read_bytes_per_s > margin * (last_operations / operations_per_s)
            and more_bytes
        ):
            all_bytes = range(first_bytes, last_bytes + 1, more_bytes)
            seconds = [num_bytes / read_bytes_per_s + overhead_s for num_bytes in all_bytes]
        else:
            seconds = [
                max(
                    (first_bytes + idx * more_bytes) / read_bytes_per_s,
                    (first_operations + idx * more_operations) / operations_per_s,
                )
                + overhead_s
                for idx in range(count)
            ]
        seconds[0] += start_s
        return list(accumulate(seconds))

    def _additive_work(self, parts: Sequence[StepItem]) -> StepWork:
        """Return `step_work` of a model without windows and chunks, without a loop over layers."""
        num_tokens = num_read = num_pairs = num_late_pairs = num_cached = num_late_cached = num_carried = 0
        for start, count, item_read, _ in parts:
            num_tokens += count
            num_pairs += count * start + count * (count + 1) // 2
            num_cached += start
            num_carried += start > 0
            if item_read:
                num_read += item_read
                num_late_pairs += item_read * (start + count - item_read) + item_read * (item_read + 1) // 2
                num_late_cached += start
        model = self._model
        read_weights = int(model.weight_bytes[0] * model.num_tail) + int(model.weight_bytes[1] * model.num_head)
        (operations, late_operations), (values, late_values) = self._pair_operations, self._cached_values
        return StepWork(
            weight_bytes=int(model.weight_bytes[0] * model.num_body) + (read_weights if num_read else 0),
            cache_bytes=model.element_bytes * (values * num_cached + late_values * num_late_cached)
            + model.state_bytes * num_carried,
            operations=2 * (num_tokens * model.num_body + num_read * (model.num_tail + model.num_head))
            + operations * num_pairs
            + late_operations * num_late_pairs
            + STATE_OPERATIONS * num_tokens * model.num_state_values,
        )
