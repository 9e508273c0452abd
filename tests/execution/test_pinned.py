"""Memory of the host that a GPU copies from and to."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from quire.execution.step.pinned import pinned_bytes

NUM_BYTES = 100_001


class _Runtime:
    """The calls of CUDA's runtime.

    Attributes:
        registered: bytes by address.
        last_error: error that the next launch raises, as CUDA keeps it.
    """

    def __init__(self, error: int = 0) -> None:
        self._error = error
        self.registered: dict[int, int] = {}
        self.last_error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        if not self._error:
            self.registered[address] = num_bytes
        self.last_error = self._error
        return self._error

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def launch(self, *_args: object, **_options: object) -> None:
        """Launch a kernel, after which torch asks for the last error."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


def test_no_more_is_pinned_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = _Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory: Any = pinned_bytes(NUM_BYTES)
    assert runtime.registered == {memory.data_ptr(): NUM_BYTES}
    assert not len(pinned_bytes(0))
    del memory
    gc.collect()
    assert not runtime.registered


def test_torch_pins_what_cannot_be_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = _Runtime(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    pinned: list[bool] = []
    empty = torch.empty

    def seen(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", seen)
    assert len(pinned_bytes(NUM_BYTES)) == NUM_BYTES
    assert pinned == [False, True]
    assert "100001 bytes of the host cannot be registered (CUDA error 2)" in caplog.text
    assert not runtime.last_error, "the next launch would fail"


@pytest.mark.gpu
def test_on_a_gpu_copies_go_both_ways() -> None:
    memory = pinned_bytes(NUM_BYTES)
    assert memory.is_pinned()
    there = torch.arange(NUM_BYTES, device="cuda").to(torch.uint8)
    memory.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(memory, there.cpu())
    back = torch.zeros_like(there)
    back.copy_(memory, non_blocking=True)
    assert torch.equal(back, there)


@pytest.mark.gpu
def test_on_a_gpu_kernels_run_where_memory_cannot_be_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    class Refusing:
        @staticmethod
        def cudaHostRegister(address: int, num_bytes: int, _flags: int) -> int:
            return int(runtime.cudaHostRegister(address, num_bytes, 255))  # there is no such flag

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    assert pinned_bytes(NUM_BYTES).is_pinned()
    assert torch.arange(3, device="cuda").tolist() == [0, 1, 2]
