"""The servers of a proxy, and the router that chooses among them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

from quire.errors import ConfigError
from quire.fleet.proxy.replica import Replica
from quire.fleet.proxy.shared_state import SharedState
from quire.fleet.proxy.tokenizers import Tokenizers
from quire.fleet.routing.breaker import BreakerState
from quire.fleet.routing.ejection import Ejector
from quire.fleet.routing.failure_policy import FailurePolicy
from quire.fleet.routing.router import Router, RouterConfig

logger = logging.getLogger(__name__)

# Time for which the first probes are waited for before requests are taken.
FIRST_PROBES_S: Final = 2.0
# Suffix of Ollama's names, which may be missing.
LATEST: Final = ":latest"


class Fleet:
    """The servers.

    Args:
        urls: addresses of the servers.
        key: key for the proxy's own requests: the operators' key if there is one; None without keys.
        probe_interval_s: time between two probes of a server.
        config: constants of the router.
        policy: policies where servers fail.

    Attributes:
        router: the router, which knows each server by its address.
        replicas: servers by address.
        policy: policies where servers fail.
        tokenizers: tokenizers of the servers.
        shared: state that all servers share.

    Raises:
        ConfigError: there is no server, or a server is given twice, or an address is invalid.
    """

    def __init__(
        self,
        urls: Sequence[str],
        key: str | None,
        probe_interval_s: float,
        config: RouterConfig | None = None,
        policy: FailurePolicy | None = None,
    ) -> None:
        names = [url.rstrip("/") for url in urls]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"to must name servers, each once, got {','.join(names)!r}", field="to")
        self.router = Router(config)
        headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
        self.policy = policy or FailurePolicy()
        self._ejector = Ejector(self.policy)
        self.shared = SharedState()
        self.replicas = {
            name: Replica(name, self.router, self._ejector.add(name), self.shared, headers) for name in names
        }
        self._was_mixed = False
        self._probe_interval_s = probe_interval_s
        self.tokenizers = Tokenizers()
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Probe all servers until `stop`; wait for the first probes, but not for slow ones."""
        self._watching = [
            asyncio.create_task(replica.watch(self._probe_interval_s)) for replica in self.replicas.values()
        ]
        probes = [asyncio.create_task(replica.probed.wait()) for replica in self.replicas.values()]
        _, slow = await asyncio.wait(probes, timeout=FIRST_PROBES_S)
        for probe in slow:
            probe.cancel()

    async def stop(self) -> None:
        """End the probes, and close all connections to servers."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)

    def available(self, excluded: Sequence[str] = ()) -> list[Replica]:
        """Return the servers that take requests, the fewest requests in flight first.

        If all servers that are up are busy or ejected, the busy ones take requests nevertheless, else the ejected ones.
        """
        usable = [replica for replica in self.replicas.values() if replica.is_usable]
        available = [replica for replica in usable if not replica.is_ejected] or usable
        available = [replica for replica in available if not replica.is_busy] or available
        return sorted(
            (replica for replica in available if replica.name not in excluded),
            key=lambda replica: replica.num_in_flight,
        )

    def health(self) -> dict[str, Any]:
        """Return further fields of `/health`."""
        return {}

    def refresh(self) -> None:
        """Tell the router which servers take requests; the time of an ejection may be over."""
        names = {replica.name for replica in self.available()}
        for name in self.replicas:
            if self.router.load_of(name).is_available != (name in names):
                self.router.set_available(name, name in names)

    def succeed(self, replica: Replica, *, is_trial: bool) -> None:
        """Record that a server has begun to answer a request; `is_trial` is what `Breaker.begin` returned."""
        now_s = asyncio.get_running_loop().time()
        was_closed = replica.breaker.state(now_s) is BreakerState.CLOSED
        self._ejector.succeed(replica.name, now_s, is_trial=is_trial)
        if is_trial and not was_closed:
            logger.info("%s has answered its trial, and gets requests again", replica.name)

    def fail(self, replica: Replica, why: str, *, is_trial: bool = False) -> None:
        """Record that a server has failed on a request; see `Ejector.fail`."""
        replica.why_down = why
        others = [other.name for other in self.replicas.values() if other.is_up and other is not replica]
        if self._ejector.fail(replica.name, others, asyncio.get_running_loop().time(), is_trial=is_trial):
            logger.warning("%s is ejected: %s", replica.name, why)

    @property
    def is_mixed(self) -> bool:
        """Whether the servers that are up have different models."""
        lists = {replica.models for replica in self.replicas.values() if replica.is_up and replica.models is not None}
        if len(lists) > 1 and not self._was_mixed:
            self._was_mixed = True
            shown = "; ".join(sorted(", ".join(sorted(models)[:8]) for models in lists))
            logger.warning("the servers have different models, so requests go by the model that they name: %s", shown)
        return len(lists) > 1

    def without_model(self, model: str | None) -> list[str]:
        """Return the servers that lack a model which others have, down or not; their lists are as of the last probe.

        If none has it, each of them can say so.
        """
        if model is None:
            return []
        names = {model, model.removesuffix(LATEST), model + LATEST}
        lacking = [
            name
            for name, replica in self.replicas.items()
            if replica.models is not None and names.isdisjoint(replica.models)
        ]
        return lacking if len(lacking) < len(self.replicas) else []

    async def ask_for_tokens(self, body: bytes, model: str | None) -> bytes | None:
        """Return a server's answer to `POST /prompt_tokens`; None if no server answers in time."""
        return await self.tokenizers.ask(self.available(self.without_model(model)), body)

    def describe(self) -> list[dict[str, Any]]:
        """Return the state of the servers, for operators."""
        now_s = asyncio.get_running_loop().time()
        return [
            {**replica.describe(), "tokenizer": self.tokenizers.breaker(replica).state(now_s).value}
            for replica in self.replicas.values()
        ]
