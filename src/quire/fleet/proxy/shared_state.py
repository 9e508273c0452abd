"""State that all servers share: adapters and pins that were changed through the proxy, and resets of their caches.

A server that comes up is told the changes that it has missed, in order, before it gets requests. A restarted server has
missed all of them but resets, since its cache is empty. Of an adapter, a pin or the reset only the last change is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from quire.fleet.proxy.exchange import Exchange

logger = logging.getLogger(__name__)

RESET: Final = "/reset_prefix_cache"
ADAPTERS: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
# Routes that change the state of every server, and the field with the name of what they change.
NAME_OF: Final = {
    RESET: None,
    "/pin_prefix": "name",
    "/unpin_prefix": "name",
    **dict.fromkeys(ADAPTERS, "lora_name"),
}
# Bounds of the changes that are kept; the oldest are forgotten.
MAX_CHANGES: Final = 1024
MAX_CHANGE_BYTES: Final = 64 << 20


class StateChange(NamedTuple):
    """A change of every server's state.

    Args:
        seq: number, which rises with each change.
        path: route.
        body: body of the request.
        headers: its headers with the type of the body and the tenant.
    """

    seq: int
    path: str
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...]


class SharedState:
    """The last changes.

    Attributes:
        lock: held while servers are told a change, so that all of them are told the same order.
        seq: number of the last change.
        num_forgotten: changes that were forgotten because of the bounds.
    """

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.seq = self.num_forgotten = 0
        self._changes: OrderedDict[tuple[str, Any, Any], StateChange] = OrderedDict()
        self._num_bytes = 0

    def record(self, exchange: Exchange, tenant_header: str | None) -> None:
        """Record a change that at least one server has made."""
        self.seq += 1
        names = {b"content-type", (tenant_header or "content-type").lower().encode()}
        headers = tuple((name, value) for name, value in exchange.headers.raw if name in names)
        change = StateChange(self.seq, exchange.path, exchange.body, headers)
        field = NAME_OF[exchange.path]
        kind = "adapter" if exchange.path in ADAPTERS else "pin" if field else "reset"
        # A name of another type than a string is no dictionary's key; servers have refused it anyway.
        key = (kind, str(exchange.fields.get(field)) if field else None, headers if kind == "pin" else None)
        before = self._changes.get(key)
        # A replaced change keeps its place, because later ones may need it: a pin for an adapter.
        self._changes[key] = change
        self._num_bytes += len(change.body) - (len(before.body) if before is not None else 0)
        while len(self._changes) > MAX_CHANGES or self._num_bytes > MAX_CHANGE_BYTES:
            _, oldest = self._changes.popitem(last=False)
            self._num_bytes -= len(oldest.body)
            self.num_forgotten += 1
            logger.warning("servers that come up will not be told a %s, the oldest of many changes", oldest.path)

    def missed(self, told_seq: int, reset_seq: int) -> list[StateChange]:
        """Return the changes after some numbers, in order.

        Args:
            told_seq: number of the last change that the server was told since it has come up.
            reset_seq: number of the last change that the server was told at all, for resets.
        """
        return [
            change
            for change in self._changes.values()
            if change.seq > (max(told_seq, reset_seq) if change.path == RESET else told_seq)
        ]
