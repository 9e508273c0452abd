"""The check of the GPU for `quire doctor`: memory, dtypes, and kernels."""

from __future__ import annotations

from typing import NamedTuple

from quire.config import GIB, CacheConfig


class GPU(NamedTuple):
    """The properties of a GPU, from torch and Triton.

    Args:
        name: name of the GPU.
        capability: compute capability.
        num_processors: number of streaming multiprocessors.
        total_bytes: size of the memory.
        free_bytes: size of the free memory.
        triton: version of Triton; None if it cannot be imported.
        is_interpreted: True if Triton would interpret its kernels on the CPU.
    """

    name: str
    capability: tuple[int, int]
    num_processors: int
    total_bytes: int
    free_bytes: int
    triton: str | None = None
    is_interpreted: bool = False


def find_gpu() -> GPU | None:
    """Return the GPU on which models would run; None if torch finds none."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    free_bytes, total_bytes = torch.cuda.mem_get_info(0)
    capability = properties.major, properties.minor
    shape = properties.name, capability, properties.multi_processor_count, total_bytes, free_bytes
    try:
        import triton
    except ImportError:
        return GPU(*shape)
    return GPU(*shape, triton.__version__, bool(triton.knobs.runtime.interpret))


def describe(gpu: GPU) -> list[tuple[str, bool, str, str]]:
    """Return the findings: name, True if it is as it should be, description, and advice."""
    from quire.ops import BFLOAT16_CAPABILITY

    major, minor = gpu.capability
    has_bfloat16 = gpu.capability >= BFLOAT16_CAPABILITY
    share = CacheConfig().gpu_memory_utilization
    free, total = gpu.free_bytes / GIB, gpu.total_bytes / GIB
    is_free = gpu.free_bytes >= share * gpu.total_bytes
    used = "" if is_free else "end the other processes on it, or give a smaller gpu_memory_utilization"
    kernels = f"Triton {gpu.triton}: its kernels, with captured decode steps"
    if gpu.triton is None:
        kernels = "torch only: Triton cannot be imported"
    elif gpu.is_interpreted:
        kernels = "Triton would interpret its kernels on the CPU, for TRITON_INTERPRET is set"
    elif not has_bfloat16:
        kernels = "torch, unless --kernels triton asks for others"
    can_launch = gpu.triton is not None and not gpu.is_interpreted
    advice = "" if can_launch else "unset TRITON_INTERPRET" if gpu.is_interpreted else "install quire[gpu]"
    return [
        ("device", True, f"{gpu.name}, compute capability {major}.{minor}, {gpu.num_processors} processors", ""),
        ("GPU memory", is_free, f"{free:.1f} of {total:.1f} GiB free; an engine takes {share:g} of all", used),
        (
            "GPU dtypes",
            has_bfloat16,
            "bfloat16, float16" if has_bfloat16 else "float16; weights of bfloat16 are rounded to it",
            "",
        ),
        ("GPU kernels", can_launch, kernels, advice),
    ]
