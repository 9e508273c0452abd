"""Options of captured decode steps, and the ladder of their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quire.config.checks import check_flag, check_whole
from quire.errors import ConfigError, shown

# The most sequences of a captured step, where no sizes are given.
LARGEST_SIZE: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphConfig:
    """Captured decode steps (CUDA graphs), which Triton kernels have.

    Args:
        enforce_eager: launch every step kernel by kernel, and capture none.
        cudagraph_capture_sizes: numbers of sequences to capture decode steps for, such as (1, 2, 4, 8): a step replays
            the next larger one, and one with more sequences than all is launched kernel by kernel. By default 1, 2, 4
            and multiples of 8, on a GPU.
    """

    enforce_eager: bool = False
    cudagraph_capture_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_flag("enforce_eager", self.enforce_eager)
        sizes: object = self.cudagraph_capture_sizes
        if sizes is None:
            return
        if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
            raise ConfigError(
                f"cudagraph_capture_sizes must be numbers of sequences or None, got {shown(sizes)}",
                field="cudagraph_capture_sizes",
            )
        for size in sizes:
            check_whole("cudagraph_capture_sizes", size, 1)
        object.__setattr__(self, "cudagraph_capture_sizes", tuple(sorted(set(sizes))))
        if self.enforce_eager:
            raise ConfigError(
                f"cudagraph_capture_sizes {shown(sizes)} are for captured steps, and enforce_eager captures none: "
                "leave one of the two out",
                field="cudagraph_capture_sizes",
            )

    def check_kernels(self, kernels: str) -> None:
        """Refuse sizes where no kernels can be captured.

        Args:
            kernels: option of this name.

        Raises:
            ConfigError: other kernels than Triton's.
        """
        if self.cudagraph_capture_sizes is not None and kernels != "triton":
            raise ConfigError(
                f"cudagraph_capture_sizes needs kernels 'triton', got kernels {kernels!r}",
                field="cudagraph_capture_sizes",
            )

    def sizes(self, kernels: str, device: str, max_num_seqs: int) -> tuple[int, ...]:
        """Return the sizes to capture, rising; none where every step is launched kernel by kernel.

        Args:
            kernels: option of this name.
            device: "cpu" or "cuda". On a CPU, where Triton's interpreter runs, only sizes that are given are captured.
            max_num_seqs: maximum number of sequences of a step.
        """
        if self.enforce_eager or kernels != "triton":
            return ()
        given = self.cudagraph_capture_sizes
        if given is None:
            if device == "cpu":
                return ()
            largest = min(max_num_seqs, LARGEST_SIZE)
            given = (1, 2, 4, *range(8, 257, 8), *range(272, LARGEST_SIZE + 1, 16))
            return (*(size for size in given if size < largest), largest)
        return tuple(size for size in given if size <= max_num_seqs) or (min(given[0], max_num_seqs),)
