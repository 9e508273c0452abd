"""Captured calls: launches that were recorded once, and are made again without the program that made them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import torch


class CapturedCall(NamedTuple):
    """A captured call.

    Args:
        replay: makes its launches again, on the same memory; the host does not wait for them.
    """

    replay: Callable[[], None]


class StepCapture(Protocol):
    """Captures calls: CUDA graphs on a GPU, and on a CPU their twin."""

    def capture(self, run: Callable[[], object]) -> CapturedCall:
        """Capture what a call launches.

        Args:
            run: reads and writes static memory only, launches the same whatever is in it, and waits for nothing. It is
                called more than once: what it launches for the first time is compiled.

        Raises:
            RuntimeError: the call waits for the device, or does something else that cannot be captured.
        """

    def capture_pieces(self, run: Callable[[Callable[[], None]], object]) -> list[CapturedCall]:
        """Capture what a call launches in pieces, between which others may launch what they like.

        Args:
            run: see `capture`; it calls the function that it is given where one piece ends and the next one begins.

        Raises:
            RuntimeError: see `capture`.
        """


class CudaCapture:
    """Captures calls as CUDA graphs, which share their memory: replay them one after the other, on one stream.

    Args:
        device: device of the graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def capture(self, run: Callable[[], object]) -> CapturedCall:
        """Run the call twice, so that all it needs is compiled and allocated, then capture it."""
        (call,) = self.capture_pieces(lambda _: run())
        return call

    def capture_pieces(self, run: Callable[[Callable[[], None]], object]) -> list[CapturedCall]:
        """Run the call twice, then capture it, with a graph for each piece."""
        self._warm_up(lambda: run(lambda: None))
        # Graphs have memory of their own: the allocator's cache of the warm-up is of no use to them.
        torch.cuda.empty_cache()
        graphs: list[torch.cuda.CUDAGraph] = []

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            # Not by the context of `torch.cuda.graph`, which leaves the stream of captures the current one where one
            # fails. Other threads may allocate pinned memory meanwhile.
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
                with suppress(RuntimeError):  # the first error says why
                    end()
                raise
            end()
        torch.cuda.synchronize(self._device)
        return [CapturedCall(graph.replay) for graph in graphs]

    def _warm_up(self, run: Callable[[], object]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
            # A call that waits is refused here: the allocator does not get over a capture that fails.
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        torch.cuda.synchronize(self._device)
