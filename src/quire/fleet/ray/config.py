"""The options of a Serve application: for the engine, the server, and the replicas."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from quire.config import EngineConfig, option_sections
from quire.config.checks import check_positive, check_text, check_whole
from quire.errors import ConfigError, shown
from quire.server.settings import ServerConfig

# As in `quire serve`: an offline engine's queue is unlimited, a server's is limited.
DEFAULT_MAX_QUEUE_LEN: Final = 1024
# Options of Serve's own proxies, in `http_options` of its configuration.
OF_SERVE: Final = frozenset(
    {
        *("host", "port", "uds", "ssl_certfile", "ssl_keyfile", "max_connections", "watch"),
        *("receive_timeout_s", "send_timeout_s", "keep_alive_timeout_s"),
    }
)
ROUTER: Final = "quire.fleet.ray.request_router.CacheAwareRouter"
KEYS: Final = {"api_key": "QUIRE_API_KEY", "operator_key": "QUIRE_OPERATOR_KEY"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """The replicas of a Serve application.

    Args:
        num_replicas: number of replicas; the minimum if `max_replicas` is set.
        max_replicas: maximum number of replicas; None for a fixed number.
        target_queued_tokens: tokens of prompts that may wait at a replica before Serve adds replicas.
        target_running: sequences that may run at a replica before Serve adds replicas; None for half of `max_num_seqs`.
        upscale_delay_s: time with more work than the targets before Serve adds replicas.
        downscale_delay_s: time with less work than the targets before Serve removes replicas.
        num_ingress: replicas of the ingress, each with its own router.
        num_cpus: cores of each rank of a replica; also the default of `num_threads`.
        num_gpus: GPUs of a replica, for all its ranks; below 1, replicas share a GPU.
        max_ongoing_requests: requests at a replica, above which Serve queues them; the engine's own queue is
            `max_queue_len`.
        kv_events_host: address at which replicas publish KV events: 127.0.0.1 if all run on the ingress's node, else
            0.0.0.0.
        request_router: class of Serve's router, by its path; routers other than Quire's see the prompt as a text.
    """

    num_replicas: int = 1
    max_replicas: int | None = None
    target_queued_tokens: int = 4096
    target_running: int | None = None
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    num_ingress: int = 1
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    max_ongoing_requests: int = 2048
    kv_events_host: str = "127.0.0.1"
    request_router: str = ROUTER

    def __post_init__(self) -> None:
        for name in ("num_replicas", "target_queued_tokens", "num_ingress", "max_ongoing_requests"):
            check_whole(name, getattr(self, name), 1)
        check_whole("target_running", self.target_running, 1, optional=True)
        check_whole("max_replicas", self.max_replicas, self.num_replicas, optional=True)
        for name in ("num_cpus", "num_gpus", "upscale_delay_s", "downscale_delay_s"):
            check_positive(name, getattr(self, name), allows_zero=True)
        for name in ("num_cpus", "num_gpus"):
            if round(getattr(self, name), 4) != getattr(self, name):
                raise ConfigError(f"{name} must have at most four decimals, got {getattr(self, name)!r}", field=name)
        if self.num_gpus > 1 and self.num_gpus % 1:
            raise ConfigError(f"num_gpus must be whole above 1, got {self.num_gpus:g}", field="num_gpus")
        for name in ("kv_events_host", "request_router"):
            check_text(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppConfig:
    """All options of a Serve application.

    Args:
        engine: options of the engine.
        server: options of the server.
        replicas: options of the replicas.
    """

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    replicas: ReplicaConfig = field(default_factory=ReplicaConfig)

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> AppConfig:
        """Return the options of Serve's `args`, or of `serve run ... name=value`, whose values are all strings."""
        types = {item.name: str(item.type) for part in (ServerConfig, ReplicaConfig) for item in fields(part)}
        engine: dict[str, Any] = {"max_queue_len": DEFAULT_MAX_QUEUE_LEN}
        server = {name: os.environ[variable] for name, variable in KEYS.items() if os.environ.get(variable)}
        parts: dict[str, dict[str, Any]] = {"engine": engine, "server": server, "replicas": {}}
        for key, value in arguments.items():
            name = str(key).replace("-", "_")
            if name in OF_SERVE:
                raise ConfigError(
                    f"{name} is decided by Serve's own proxies (http_options of its configuration), got {shown(value)}",
                    field=name,
                )
            part = _part_of(name)
            parts[part][name] = _read(value, types.get(name) or _engine_type(name))
        allowed = parts["server"].get("allow_origins")
        if isinstance(allowed, list):
            parts["server"]["allow_origins"] = tuple(allowed)
        replicas = ReplicaConfig(**parts["replicas"])
        if "num_threads" not in engine and replicas.num_cpus >= 1:
            engine["num_threads"] = int(replicas.num_cpus)
        return cls(
            engine=EngineConfig.from_options(**engine), server=ServerConfig(**parts["server"]), replicas=replicas
        )

    @property
    def target_running(self) -> int:
        """Sequences that may run at a replica before Serve adds replicas."""
        return self.replicas.target_running or max(1, self.engine.scheduler.max_num_seqs // 2)


def without_origins(config: ServerConfig) -> ServerConfig:
    """Return the options of a replica's server without `allow_origins`, which the ingress checks."""
    return replace(config, allow_origins=())


def _part_of(name: str) -> str:
    if any(item.name == name for item in fields(ServerConfig)):
        return "server"
    if any(item.name == name for item in fields(ReplicaConfig)):
        return "replicas"
    return "engine"


def _engine_type(name: str) -> str:
    """Return the type of an engine's option as written in the code; "" for an unknown option."""
    part = option_sections().get(name)
    section = getattr(EngineConfig(), part) if part is not None else None
    return next((str(item.type) for item in fields(section) if item.name == name), "") if section else ""


def _read(value: Any, written_type: str) -> Any:
    """Parse a string as JSON, unless the option's type is a string."""
    if not isinstance(value, str) or "str" in written_type:
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
