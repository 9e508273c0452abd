"""Whether the GPU of this process can still be used after an error."""

from __future__ import annotations

import torch

from quire.errors import DeviceFailed, WorkerError


def require_device() -> None:
    """Raise the error of the GPU, if this process uses one and it has failed, without a wait for its work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().query()


def step_error(what: str, error: Exception) -> WorkerError:
    """Return the error of a step that has failed, or of copies."""
    reason = f"{what} ({type(error).__name__}: {error})"
    try:
        require_device()
    except RuntimeError as fault:
        return DeviceFailed(f"{reason}; the GPU cannot be used any more ({fault})")
    return WorkerError(reason)
