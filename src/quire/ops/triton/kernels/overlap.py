"""Programmatic dependent launch (from Hopper on): a kernel is launched while the previous one still runs.

A kernel launched this way may start once all programs of the previous one have called `wait_for_previous` or exited.
Before that call returns, a program reads no results of other kernels and writes nothing; after it, all earlier kernels
have ended. Idle programs must call it too: otherwise a kernel could end before the previous one does.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def prefetch(places):
    """Prefetch the cache lines of pointers into L2, asynchronously; kernels may write to that memory meanwhile."""
    tl.inline_asm_elementwise(
        "mov.b32 $0, 0; prefetch.global.L2 [$1];", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait for all earlier kernels, and allow the next one to launch (griddepcontrol)."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
