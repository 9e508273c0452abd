"""Captures as CUDA graphs: calls that cannot be captured leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire.execution.capture.step_capture import CudaCapture


class _Device:
    """What `torch.cuda` is asked for, without a GPU: graphs whose captures fail, streams, and waits that are refused.

    Attributes:
        stream: current stream.
        mode: what becomes of calls that wait.
        num_underway: number of captures that have begun and not ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fails_at_end: bool) -> None:
        self.stream, self.mode, self.num_underway = "first", 0, 0
        device = self

        class Graph:
            def capture_begin(self, **_: Any) -> None:
                device.num_underway += 1

            def capture_end(self) -> None:
                if fails_at_end:
                    raise RuntimeError("the capture was invalidated")
                device.num_underway -= 1

            def pool(self) -> int:
                return 1

            def replay(self) -> None: ...

        class Stream:
            def __init__(self, _: torch.device) -> None: ...

            def wait_stream(self, _: object) -> None: ...

        def set_mode(mode: int | str) -> None:
            self.mode = 2 if mode == "error" else int(mode)

        for name, value in {
            "CUDAGraph": Graph,
            "Stream": Stream,
            "stream": self._streams,
            "current_stream": lambda _: None,
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
            "get_sync_debug_mode": lambda: self.mode,
            "set_sync_debug_mode": set_mode,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def _streams(self, _: object) -> Iterator[None]:
        before, self.stream = self.stream, "of captures"
        try:
            yield
        finally:
            self.stream = before

    def wait(self) -> None:
        """Do what waits for the device."""
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")


CAPTURES: list[Callable[[CudaCapture, Callable[[], object]], object]] = [
    lambda capture, run: capture.capture(run),
    lambda capture, run: capture.capture_pieces(lambda _: run()),
]


@pytest.mark.parametrize("capture", CAPTURES, ids=["whole", "pieces"])
def test_a_call_that_waits_is_refused_before_a_capture_begins(
    capture: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _Device(monkeypatch, fails_at_end=True)
    with pytest.raises(RuntimeError, match="synchronizing"):
        capture(CudaCapture(torch.device("cuda")), device.wait)
    assert (device.stream, device.mode, device.num_underway) == ("first", 0, 0)


@pytest.mark.parametrize("capture", CAPTURES, ids=["whole", "pieces"])
@pytest.mark.parametrize("fails", ["call", "end"])
def test_a_capture_that_fails_leaves_its_stream(
    fails: str, capture: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _Device(monkeypatch, fails_at_end=True)

    def run() -> None:
        if device.num_underway and fails == "call":
            raise RuntimeError("an operator cannot be captured")

    with pytest.raises(RuntimeError, match="cannot be captured" if fails == "call" else "was invalidated"):
        capture(CudaCapture(torch.device("cuda")), run)
    assert (device.stream, device.mode) == ("first", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("capture", CAPTURES, ids=["whole", "pieces"])
def test_on_a_gpu_a_call_that_waits_is_refused_and_others_are_captured(capture: Callable[..., object]) -> None:
    device = torch.device("cuda")
    x, first = torch.ones(4, device=device), torch.cuda.current_stream()
    captures = CudaCapture(device)
    with pytest.raises(RuntimeError):
        capture(captures, lambda: x.sum().item())
    assert torch.cuda.current_stream() == first
    call = captures.capture(lambda: x.add_(1))
    call.replay()
    assert x.tolist() == [4.0] * 4
