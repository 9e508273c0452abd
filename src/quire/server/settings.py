"""What a user can ask of the HTTP server, beside the engine's own options."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field

from quire.errors import ConfigError

DEFAULT_MAX_BODY_BYTES = 8 << 20
DEFAULT_MAX_REQUEST_LOGPROBS = 4_000_000
# "auto", or a format of `quire.text.tool_calls`, which takes longer to import than the command line should.
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3", "mistral")
# What the name of a header is made of, by RFC 9110.
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, whom it lets in, and how long it waits.

    Args:
        host: the address to listen on; anything but loopback needs `api_key`.
        port: 0 takes a free one.
        api_key: what clients must show on every route but `/health`; None lets this machine's users in.
        operator_key: what opens the routes of operation, beside all others; None leaves them to `api_key`.
        allow_origins: web origins whose pages may call the server; none by default.
        tenant_header: the header in which a gateway in front says whose a request is; None where all are one tenant's.
        tool_call_parser: the format in which the model writes calls of tools; "auto" finds it in its chat template.
        max_body_bytes: the longest request body.
        max_prompts: prompts of one request at most.
        max_request_logprobs: log probabilities that the answer to one request may hold at most.
        max_connections: connections at a time; None takes what the limit of open files leaves, 8,192 at most.
        receive_timeout_s: in which a client must send a request; a long one has a second more for each 16 KiB.
        send_timeout_s: in which a client must take something of what is sent to it.
        keep_alive_timeout_s: how long a connection stays open behind an answer, for the next request.
        drain_timeout_s: how long running requests may go on once the server was asked to stop.
        ping_interval_s: silence on a stream after which a comment keeps the connection open.
        log_interval_s: how often the throughput line is logged; 0 never logs it.

    Raises:
        ConfigError: a value that is not allowed, or an open address without a key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    operator_key: str | None = field(default=None, repr=False)
    allow_origins: tuple[str, ...] = ()
    tenant_header: str | None = None
    tool_call_parser: str = "auto"
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_prompts: int = 256
    max_request_logprobs: int = DEFAULT_MAX_REQUEST_LOGPROBS
    max_connections: int | None = None
    receive_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0
    ping_interval_s: float = 15.0
    log_interval_s: float = 10.0

    def __post_init__(self) -> None:
        _within("port", self.port, 0, 65535)
        _within("max_body_bytes", self.max_body_bytes, 1, 1 << 40)
        _within("max_prompts", self.max_prompts, 1, 1 << 20)
        _within("max_request_logprobs", self.max_request_logprobs, 0, 1 << 40)
        if self.max_connections is not None:
            _within("max_connections", self.max_connections, 1, 1 << 20)
        _within("receive_timeout_s", self.receive_timeout_s, 0.1, 86400)
        _within("send_timeout_s", self.send_timeout_s, 0.1, 86400)
        _within("keep_alive_timeout_s", self.keep_alive_timeout_s, 0.1, 86400)
        _within("drain_timeout_s", self.drain_timeout_s, 0, 86400)
        _within("ping_interval_s", self.ping_interval_s, 0.001, 86400)
        _within("log_interval_s", self.log_interval_s, 0, 86400)
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            raise ConfigError(
                f"tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, got {self.tool_call_parser!r}",
                field="tool_call_parser",
            )
        for name in ("api_key", "operator_key"):
            key = getattr(self, name)
            if key is not None and not (key.isascii() and key.strip()):
                raise ConfigError(f"{name} must be ASCII text that is not blank", field=name)
        if self.operator_key is not None and self.operator_key == self.api_key:
            raise ConfigError("operator_key must differ from api_key", field="operator_key")
        if self.tenant_header is not None and not HEADER_NAME.fullmatch(self.tenant_header):
            raise ConfigError(
                f"tenant_header must be the name of a header, like X-Tenant, got {self.tenant_header!r}",
                field="tenant_header",
            )
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from other machines, which needs an API key: "
                "set --api-key (or QUIRE_API_KEY), or listen on 127.0.0.1",
                field="host",
            )


def is_loopback(host: str) -> bool:
    """Tell whether an address can be reached from this machine only; names other than localhost count as open."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, got {value!r}", field=name)
