"""The options of the servers of `quire serve --replicas`: the resolved options of the parent, without the address."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple

from quire.config import EngineConfig
from quire.config.cpu_bind import cpu_lists
from quire.errors import ConfigError
from quire.server.log_setup import LogSettings
from quire.server.settings import ServerConfig

MAX_REPLICAS: Final = 64
HOST: Final = "127.0.0.1"
# Free ports of this machine, which each server states to the proxy.
EVENTS: Final = {
    "enable_kv_cache_events": True,
    "endpoint": f"tcp://{HOST}:*",
    "replay_endpoint": f"tcp://{HOST}:*",
}
# Options of the address where clients connect, with their values at the servers, whose only client is the proxy.
OF_FRONT: Final[Mapping[str, Any]] = {
    "host": HOST,
    "port": 0,
    "uds": None,
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "allow_origins": (),
    "max_connections": None,
}


class LocalSettings(NamedTuple):
    """All options of a server in a process of its own.

    Args:
        engine: options of the engine.
        server: options of the server.
        log: level and form of its log.
    """

    engine: EngineConfig
    server: ServerConfig
    log: LogSettings

    def to_json(self) -> str:
        """Return the options for another process; see `from_json`."""
        return json.dumps({"engine": self.engine.to_options(), "server": asdict(self.server), "log": asdict(self.log)})

    @classmethod
    def from_json(cls, text: str) -> LocalSettings:
        """Return the options of `to_json`."""
        parts = json.loads(text)
        server = {**parts["server"], "allow_origins": tuple(parts["server"]["allow_origins"])}
        return cls(EngineConfig.from_options(**parts["engine"]), ServerConfig(**server), LogSettings(**parts["log"]))


@dataclass(frozen=True, slots=True)
class SharedMachine:
    """Resources of the machine for all servers together.

    Args:
        num_cores: number of cores.
        has_events: whether the packages of KV events are installed; without them, requests are routed by load.
    """

    num_cores: int
    has_events: bool


def settings_of_servers(
    count: int, engine: EngineConfig, server: ServerConfig, log: LogSettings, machine: SharedMachine
) -> LocalSettings:
    """Return the options of each of several servers, from the options of `quire serve`.

    Args:
        count: number of servers.
        engine: options of the engine.
        server: options of the server, which hold for the proxy too.
        log: level and form of the log.
        machine: resources of the machine.

    Raises:
        ConfigError: the number of servers is not allowed, or an option cannot hold for several servers.
    """
    if not 1 <= count <= MAX_REPLICAS:
        raise ConfigError(f"replicas must be from 1 to {MAX_REPLICAS}, got {count}", field="replicas")
    _check_shared(engine, server)
    model = engine.model
    # Each measures the memory that is available before the others have taken theirs.
    cache = replace(engine.cache, kv_cache_memory_fraction=engine.cache.kv_cache_memory_fraction / count)
    if model.num_threads is None and cpu_lists(engine.parallel.cpu_bind) is None:
        num_threads = max(1, machine.num_cores // (count * engine.parallel.num_ranks))
        engine = replace(engine, model=replace(model, num_threads=num_threads))
    if cache.kv_events_config is None and cache.enable_prefix_caching and machine.has_events:
        cache = replace(cache, kv_events_config=EVENTS)
    engine = replace(engine, cache=cache)
    return LocalSettings(engine, replace(server, **OF_FRONT), log)


def _check_shared(engine: EngineConfig, server: ServerConfig) -> None:
    """Refuse options that only one server can have: its terminal, its file, its port."""
    if server.watch:
        raise _only_one("watch", "the terminal can show the block map of one server")
    if engine.cache.record_memory is not None:
        raise _only_one("record_memory", f"one server can write the file {engine.cache.record_memory!r}")
    events, transfer = engine.cache.kv_events, engine.cache.transfer
    if events is not None:
        for endpoint in filter(None, (events.endpoint, events.replay_endpoint)):
            if events.is_local(endpoint) and not endpoint.endswith(":*"):
                raise _only_one("kv_events_config", f"one server can listen at {endpoint}; the port * takes a free one")
    if transfer is not None and transfer.is_producer and transfer.kv_port:
        raise _only_one(
            "kv_transfer_config", f"one server can listen at kv_port {transfer.kv_port}; 0 takes a free one"
        )


def _only_one(field: str, why: str) -> ConfigError:
    return ConfigError(f"{field} cannot be combined with several servers (replicas): {why}", field=field)
