"""Options of KV transfer between engines, with the keys of vLLM's `kv_transfer_config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_address
from typing import Any, Final

from quire.config.checks import check_positive, check_text, check_whole
from quire.errors import ConfigError, shown

NAME: Final = "kv_transfer_config"
CONNECTOR: Final = "QuireConnector"
ROLES = ("kv_producer", "kv_consumer", "kv_both")
FAILURE_POLICIES = ("recompute", "fail")
UNIX: Final = "unix:"
EXTRA = ("token", "timeout_s", "ttl_s", "allowed_hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """Transfer of published blocks to and from other engines.

    Args:
        kv_connector: "QuireConnector", the only one.
        kv_role: "kv_producer" (exports blocks), "kv_consumer" (fetches blocks) or "kv_both".
        kv_ip: address on which a producer listens, and which its responses name; "unix:PATH" for a socket of this host.
        kv_port: port; 0 takes a free one.
        kv_buffer_size: maximum size in bytes of the blocks that a producer keeps for other engines.
        kv_load_failure_policy: handling of a request whose blocks do not arrive: "recompute" or "fail".
        engine_id: name of this engine; None takes a random one.
        token: secret that both sides must know; required if `kv_ip` is not an address of this host.
        timeout_s: maximum wait for a response of another engine.
        ttl_s: time for which a producer keeps a block.
        allowed_hosts: addresses that requests may name, as they name them: "HOST:PORT", "HOST" for all of its ports, or
            "unix:PATH". Others are refused, those of this machine too, where a port may be that of any service.
    """

    kv_connector: str = CONNECTOR
    kv_role: str
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_buffer_size: int = 1_000_000_000
    kv_load_failure_policy: str = "recompute"
    engine_id: str | None = None
    token: str | None = None
    timeout_s: float = 5.0
    ttl_s: float = 480.0
    allowed_hosts: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for name, allowed in (
            ("kv_connector", (CONNECTOR,)),
            ("kv_role", ROLES),
            ("kv_load_failure_policy", FAILURE_POLICIES),
        ):
            if getattr(self, name) not in allowed:
                raise _bad(name, getattr(self, name), "one of " + ", ".join(allowed))
        check_text(f"{NAME}.kv_ip", self.kv_ip)
        check_whole(f"{NAME}.kv_port", self.kv_port, 0, 65535)
        check_whole(f"{NAME}.kv_buffer_size", self.kv_buffer_size, 1 << 20)
        check_text(f"{NAME}.engine_id", self.engine_id, optional=True)
        check_text(f"{NAME}.token", self.token, optional=True)
        check_positive(f"{NAME}.timeout_s", self.timeout_s)
        check_positive(f"{NAME}.ttl_s", self.ttl_s)
        if not all(isinstance(host, str) for host in self.allowed_hosts):
            raise _bad("allowed_hosts", self.allowed_hosts, "a list of names or addresses")
        if self.is_producer and not is_local(self.kv_ip) and self.token is None:
            raise _bad("kv_ip", self.kv_ip, "an address of this host, or a token in kv_connector_extra_config")

    @property
    def is_producer(self) -> bool:
        """Whether the engine exports blocks."""
        return self.kv_role != "kv_consumer"

    @property
    def is_consumer(self) -> bool:
        """Whether the engine fetches blocks."""
        return self.kv_role != "kv_producer"

    def refused_field(self, host: str, port: int) -> str | None:
        """Return the field of a request's address that `allowed_hosts` does not allow; None if it allows both.

        Args:
            host: `remote_host`, a name or address, or "unix:PATH".
            port: `remote_port`.
        """
        if host in self.allowed_hosts:
            return None
        prefix = f"[{host}]:" if ":" in host else f"{host}:"
        ports = [entry for entry in self.allowed_hosts if entry.startswith(prefix)]
        if host.startswith(UNIX) or not ports:
            return "remote_host"
        return None if f"{prefix}{port}" in ports else "remote_port"


def is_local(host: str) -> bool:
    """Return whether an address is one of this host, without name resolution."""
    if host == "localhost" or host.startswith(UNIX):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def read_kv_transfer(value: object) -> KVTransferConfig | None:
    """Return the configuration from a mapping or its JSON; None for None."""
    if value is None:
        return None
    options: Any = value
    if isinstance(value, str):
        try:
            options = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{NAME} must be a JSON object, got {shown(value)}: {error}", field=NAME) from None
    if not isinstance(options, Mapping):
        raise ConfigError(f"{NAME} must be a JSON object or a mapping, got {shown(value)}", field=NAME)
    flat = dict(options)
    extra = flat.pop("kv_connector_extra_config", None) or {}
    if not isinstance(extra, Mapping):
        raise _bad("kv_connector_extra_config", extra, "an object")
    # Fields of vLLM without a meaning here, with their neutral values.
    for name, neutral in (("kv_buffer_device", ("cpu", "cuda")), ("kv_rank", (None, 0, 1)), ("kv_parallel_size", (1,))):
        if name in flat and flat.pop(name) not in neutral:
            raise _bad(name, options[name], f"one of {', '.join(map(str, neutral))}, or absent")
    names = {item.name for item in fields(KVTransferConfig)} - set(EXTRA)
    for unknown in flat.keys() - names:
        raise _bad(unknown, flat[unknown], f"absent; known keys are {', '.join(sorted(names))}")
    for unknown in extra.keys() - set(EXTRA):
        raise _bad(f"kv_connector_extra_config.{unknown}", extra[unknown], f"absent; known keys are {', '.join(EXTRA)}")
    if "kv_role" not in flat:
        raise _bad("kv_role", None, "one of " + ", ".join(ROLES))
    merged = {**flat, **extra}
    if isinstance(merged.get("kv_buffer_size"), float):
        merged["kv_buffer_size"] = int(merged["kv_buffer_size"])  # vLLM's default is 1e9
    if isinstance(merged.get("allowed_hosts"), list):
        merged["allowed_hosts"] = tuple(merged["allowed_hosts"])
    elif "allowed_hosts" in merged:
        raise _bad("allowed_hosts", merged["allowed_hosts"], "a list of names or addresses")
    return KVTransferConfig(**merged)


def _bad(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{NAME}.{name} must be {allowed}, got {shown(value)}", field=NAME)
