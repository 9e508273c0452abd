"""A rank of a group on GPUs, run by `test_nccl.py`: `python -m tests.distributed.nccl_rank RANK SIZE STORE`."""

from __future__ import annotations

import sys

import torch

from quire.distributed.gloo import GlooTransport, dist
from quire.distributed.nccl import WHOLE_BYTES, connect_nccl
from quire.execution.capture.step_capture import CudaCapture

SHAPES = ((1, 1), (3, 19), (WHOLE_BYTES // 2 // 500 + 1, 501))


def main(rank: int, size: int, path: str) -> None:
    """Compare what NCCL moves with what gloo does, as it comes and in a CUDA graph; end with an error if it differs."""
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.FileStore(path, size)
    host = GlooTransport(dist.PrefixStore("host", store), rank, size, 60.0, "127.0.0.1")
    group = connect_nccl(dist.PrefixStore("gpus", store), host, device)
    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in SHAPES:
            part = torch.randn(shape, generator=generator).to(dtype)
            residual = torch.ones(shape, dtype=dtype)
            expected = host.all_reduce(part.clone(), residual)
            on_gpu, added = part.to(device), residual.to(device)
            assert torch.equal(group.all_reduce(on_gpu.clone(), added).cpu(), expected), (dtype, shape)
            total = torch.zeros_like(on_gpu)

            def add(x: torch.Tensor = on_gpu, y: torch.Tensor = added, out: torch.Tensor = total) -> None:
                out.copy_(group.all_reduce(x, y))

            call = CudaCapture(device).capture(add)
            on_gpu.copy_(part * 2)
            call.replay()
            assert torch.equal(total.cpu(), host.all_reduce(part * 2, residual)), (dtype, shape, "captured")
    widths = [5 + each for each in range(size)]
    part = torch.full((4, widths[rank]), float(rank), device=device)
    whole, known = group.gather(part, widths), host.gather(part.cpu(), widths)
    assert whole is None if known is None else torch.equal(whole.cpu(), known)
    rows = torch.full((3, 7), float(rank) + 1.0, device=device)
    group.broadcast(rows)
    assert bool((rows == 1.0).all())
    group.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
