"""Options of captured steps (CUDA graphs), and their default sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quire.config.checks import check_choices, check_flag, check_whole, choice
from quire.errors import ConfigError, shown

# Maximum number of sequences of a captured step, if no sizes are given.
LARGEST_SIZE: Final = 512
# Default numbers of tokens of piecewise captured steps: larger steps take a GPU longer than their host takes to launch.
PIECE_SIZES: Final = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
DECODES, DECODES_AND_PIECES = CUDAGRAPH_MODES = ("full_decode_only", "full_and_piecewise")


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaGraphConfig:
    """Captured steps (CUDA graphs), which require Triton kernels.

    Args:
        enforce_eager: run every step eagerly, kernel by kernel, and capture none.
        cudagraph_mode: "full_decode_only" captures decode steps. "full_and_piecewise" also captures steps with prompts,
            in pieces between attention layers, which run eagerly; it has not run on a GPU yet.
        cudagraph_capture_sizes: numbers of rows for which decode steps are captured, such as (1, 2, 4, 8): a row for
            each sequence, and one for each draft that is verified. A step replays the next larger size; a step larger
            than all sizes runs eagerly. By default 1, 2, 4, multiples of 8 up to 256 and of 16 up to 512, on a GPU.
        piecewise_cudagraph_capture_sizes: numbers of tokens for which steps are captured piecewise. By default 14
            numbers from 16 to 2048, on a GPU, with `cudagraph_mode` "full_and_piecewise".
    """

    enforce_eager: bool = False
    cudagraph_mode: str = choice(DECODES, CUDAGRAPH_MODES)
    cudagraph_capture_sizes: tuple[int, ...] | None = None
    piecewise_cudagraph_capture_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_flag("enforce_eager", self.enforce_eager)
        check_choices(self)
        for name, of in (
            ("cudagraph_capture_sizes", "rows"),
            ("piecewise_cudagraph_capture_sizes", "tokens"),
        ):
            value: object = getattr(self, name)
            if value is None:
                continue
            object.__setattr__(self, name, _sizes(name, value, of))
            if self.enforce_eager:
                raise ConfigError(
                    f"{name} {shown(value)} are for captured steps, and enforce_eager captures none: leave one of the "
                    "two out",
                    field=name,
                )
        if self.piecewise_cudagraph_capture_sizes is not None and self.cudagraph_mode == DECODES:
            raise ConfigError(
                f"piecewise_cudagraph_capture_sizes needs cudagraph_mode {DECODES_AND_PIECES!r}, got {DECODES!r}",
                field="piecewise_cudagraph_capture_sizes",
            )
        if self.enforce_eager and self.cudagraph_mode != DECODES:
            raise ConfigError(
                f"cudagraph_mode {self.cudagraph_mode!r} is for captured steps, and enforce_eager captures none: leave "
                "one of the two out",
                field="cudagraph_mode",
            )

    def check_kernels(self, kernels: str) -> None:
        """Refuse options that capture steps, if the kernels cannot be captured.

        Args:
            kernels: option of this name.

        Raises:
            ConfigError: the kernels are not Triton kernels.
        """
        if kernels == "triton":
            return
        needs = f"needs kernels 'triton', got kernels {kernels!r}"
        if self.cudagraph_capture_sizes is not None:
            raise ConfigError(f"cudagraph_capture_sizes {needs}", field="cudagraph_capture_sizes")
        if self.cudagraph_mode != DECODES:
            raise ConfigError(f"cudagraph_mode {self.cudagraph_mode!r} {needs}", field="cudagraph_mode")

    def sizes(self, kernels: str, device: str, max_num_rows: int) -> tuple[int, ...]:
        """Return the sizes of decode steps to capture, in ascending order; none if every step runs eagerly.

        Args:
            kernels: option of this name.
            device: "cpu" or "cuda". On a CPU, with Triton's interpreter, only explicitly given sizes are captured.
            max_num_rows: maximum number of rows of a step of decodes: a row for each sequence, and for each draft.
        """
        if self.enforce_eager or kernels != "triton":
            return ()
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            if device == "cpu":
                return ()
            largest = min(max_num_rows, LARGEST_SIZE)
            sizes = (1, 2, 4, *range(8, 257, 8), *range(272, LARGEST_SIZE + 1, 16))
            return (*(size for size in sizes if size < largest), largest)
        return tuple(size for size in sizes if size <= max_num_rows) or (min(sizes[0], max_num_rows),)

    def piece_sizes(self, device: str, max_num_batched_tokens: int) -> tuple[int, ...]:
        """Return the numbers of tokens of other steps to capture piecewise, in ascending order; none by default.

        Args:
            device: see `sizes`.
            max_num_batched_tokens: maximum number of tokens of a step.
        """
        sizes = self.piecewise_cudagraph_capture_sizes
        if sizes is None:
            sizes = PIECE_SIZES if device == "cuda" and self.cudagraph_mode == DECODES_AND_PIECES else ()
        kept = tuple(size for size in sizes if size < max_num_batched_tokens)
        return sizes if kept == sizes else (*kept, max_num_batched_tokens)


def _sizes(name: str, sizes: object, of: str) -> tuple[int, ...]:
    """Return checked sizes, in ascending order."""
    if not isinstance(sizes, Sequence) or isinstance(sizes, str) or not sizes:
        raise ConfigError(f"{name} must be numbers of {of} or None, got {shown(sizes)}", field=name)
    for size in sizes:
        check_whole(name, size, 1)
    return tuple(sorted(set(sizes)))
