"""Launches that overlap (programmatic dependent launch, from Hopper on): a kernel is set up while the one before ends.

A kernel that is launched so may start as soon as all programs of the one before have called `wait_for_previous`, or
have ended. Nothing that is computed is read, and nothing is written, before that returns: all kernels before have ended
then. A program that has nothing to do calls it too: a kernel whose programs did not would end before the one before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def prefetch(places):
    """Have the cache lines (L2) of pointers fetched; nothing waits for them, and others may write there meanwhile."""
    tl.inline_asm_elementwise(
        "mov.b32 $0, 0; prefetch.global.L2 [$1];", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_previous(OVERLAPS: tl.constexpr):
    """Wait for the kernels before, and let the next one be set up."""
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
