"""The attention and mask functions that transformers' modules call under the name "quire"."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor, nn

from quire.models.specs.hosted_spec import Hindrance

# Name of both functions: the value of a configuration's `_attn_implementation`.
NAME: Final = "quire"


@dataclass(frozen=True, slots=True)
class HostedMask:
    """A value that modules carry from the mask function to attention in place of a mask.

    Args:
        window: tokens that a token sees, including itself; None for all before it.
        chunk: length of the chunks, in tokens; None for no chunks.
        refusal: why attention over paged memory has no such mask, if a module uses it; None if it has.
    """

    window: int | None = None
    chunk: int | None = None
    refusal: tuple[Hindrance, str] | None = None


class AttentionHost(Protocol):
    """The attention of the forward passes of hosted modules."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """Return the attention [1, T, H, W] of queries [1, H, T, D] over keys [1, K, T, D] and values [1, K, T, W].

        Args:
            module: the module that calls.
            query, key, value: heads of the rows, rotated.
            mask: value of `make_mask` for the layer.
            options: all other arguments of the call.
        """

    def make_mask(self, arguments: dict[str, Any]) -> HostedMask:
        """Return what reaches `attend` in place of a mask; `arguments` are those of transformers' mask interface."""


class _Current(threading.local):
    """The host of the forward pass of this thread: engines of one process run in threads of their own."""

    host: AttentionHost | None = None


_CURRENT: Final = _Current()


@contextmanager
def hosted_by(host: AttentionHost) -> Iterator[None]:
    """Give the attention of forward passes in this thread to `host`."""
    before, _CURRENT.host = _CURRENT.host, host
    try:
        yield
    finally:
        _CURRENT.host = before


def register() -> None:
    """Register both functions with transformers; without the second, modules make no masks, and overlays are lost."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _make_mask)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    return current_host().attend(module, query, key, value, attention_mask, options), None


def _make_mask(**arguments: Any) -> HostedMask:
    return current_host().make_mask(arguments)


def current_host() -> AttentionHost:
    """Return the host of the forward pass of this thread."""
    host = _CURRENT.host
    if host is None:
        raise RuntimeError("modules with the attention of Quire run only in steps of their decoder")
    return host
