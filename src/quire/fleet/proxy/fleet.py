"""The servers of a proxy, and the router that chooses among them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from quire.errors import ConfigError
from quire.fleet.proxy.replica import Replica
from quire.fleet.proxy.upstream import UpstreamLost
from quire.fleet.routing.router import Router, RouterConfig

ASK_S = 2.0
# Bytes of an answer with the tokens of a prompt: a million of them have 8 MB.
MAX_TOKENS_BYTES = 16 << 20


class Fleet:
    """The servers.

    Args:
        urls: addresses of the servers.
        key: key for the proxy's own requests: the operators' key if there is one; None without keys.
        probe_interval_s: time between two probes of a server.
        config: constants of the router.

    Attributes:
        router: the router, which knows each server by its address.
        replicas: servers by address.

    Raises:
        ConfigError: there is no server, or a server is given twice, or an address is invalid.
    """

    def __init__(
        self, urls: Sequence[str], key: str | None, probe_interval_s: float, config: RouterConfig | None = None
    ) -> None:
        names = [url.rstrip("/") for url in urls]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"to must name servers, each once, got {','.join(names)!r}", field="to")
        self.router = Router(config)
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        self.replicas = {name: Replica(name, self.router, headers) for name in names}
        self._probe_interval_s = probe_interval_s
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Probe all servers once, and go on until `stop`."""
        await asyncio.gather(*(replica.probe() for replica in self.replicas.values()))
        self._watching = [
            asyncio.create_task(replica.watch(self._probe_interval_s)) for replica in self.replicas.values()
        ]

    async def stop(self) -> None:
        """End the probes, and close all connections to servers."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def available(self, excluded: Sequence[str] = ()) -> list[Replica]:
        """Return the servers that take requests, the fewest requests in flight first."""
        available = [
            replica for name, replica in self.replicas.items() if replica.is_available and name not in excluded
        ]
        return sorted(available, key=lambda replica: replica.num_in_flight)

    def refresh(self) -> None:
        """Let servers whose break is over take requests again."""
        for replica in self.replicas.values():
            if self.router.load_of(replica.name).is_available != replica.is_available:
                replica.update()

    async def ask_for_tokens(self, body: bytes) -> bytes | None:
        """Return a server's answer to `POST /prompt_tokens`; None if no server answers in time."""
        for replica in self.available()[:2]:
            try:
                status, answer = await replica.fetch(
                    "POST", "/prompt_tokens", body, timeout_s=ASK_S, max_bytes=MAX_TOKENS_BYTES
                )
            except UpstreamLost:
                continue
            # The other servers would refuse it too.
            return answer if status == 200 else None
        return None
