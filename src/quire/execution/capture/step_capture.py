"""Captured calls: kernel launches that are recorded once and replayed without the Python code that made them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch


class CapturedCall(NamedTuple):
    """A captured call.

    Args:
        replay: replays its launches, on the same memory; the host does not wait for them.
    """

    replay: Callable[[], None]


class StepCapture(Protocol):
    """Captures calls: as CUDA graphs on a GPU, as a tape of launches on a CPU (`TapeCapture`)."""

    def capture(self, run: Callable[[], object]) -> CapturedCall:
        """Capture the launches of a call.

        Args:
            run: reads and writes static memory only, makes the same launches for any contents, and does not
                synchronise with the device. It is called more than once, as the first call compiles kernels.

        Raises:
            RuntimeError: the call waits for the device, or does something else that cannot be captured.
        """

    def capture_pieces(self, run: Callable[[Callable[[], None]], object]) -> list[CapturedCall]:
        """Capture the launches of a call in pieces; a caller may make other launches between their replays.

        Args:
            run: see `capture`; it calls its argument between two pieces.

        Raises:
            RuntimeError: see `capture`.
        """


class CudaCapture:
    """Captures calls as CUDA graphs, which share a memory pool: replay them one after the other, on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def capture(self, run: Callable[[], object]) -> CapturedCall:
        """Run the call twice as a warm-up, which compiles and allocates all it needs, then capture it."""
        (call,) = self.capture_pieces(lambda _: run())
        return call

    def capture_pieces(self, run: Callable[[Callable[[], None]], object]) -> list[CapturedCall]:
        """Run the call twice as a warm-up, then capture it, with a graph for each piece."""
        self._warm_up(lambda: run(lambda: None))
        # Graphs have a memory pool of their own: they cannot reuse the blocks that the allocator cached in the warm-up.
        torch.cuda.empty_cache()
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            # The context manager `torch.cuda.graph` is not used: if a capture fails, it leaves the capture stream as
            # the current one. "thread_local": other threads may allocate pinned memory during the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            graphs.append(graph)

        def end() -> None:
            graphs[-1].capture_end()
            self._pool = graphs[-1].pool()

        def split() -> None:
            end()
            begin()

        with torch.cuda.stream(self._stream):
            begin()
            try:
                run(split)
            except BaseException:
                with suppress(RuntimeError):  # the first error has the reason
                    end()
                raise
            end()
        torch.cuda.synchronize(self._device)
        return [CapturedCall(graph.replay) for graph in graphs]

    def _warm_up(self, run: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
            # A call that synchronises is refused here: the allocator does not recover from a failed capture.
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize(self._device)
