"""The options of the HTTP server."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.config.hints import find_parser
from quire.errors import ConfigError, InvalidParameter, shown

DEFAULT_MAX_BODY_BYTES = 8 << 20
# The default where bodies may have images: two of the largest files in base64.
DEFAULT_MAX_IMAGE_BODY_BYTES = 64 << 20
DEFAULT_MAX_REQUEST_LOGPROBS = 4_000_000
# "auto", or a format of `quire.text.tool_calls`, whose import would slow the command line's start.
TOOL_CALL_PARSERS = (
    *("auto", "apertus", "cohere", "command_r", "deepseek", "deepseek_v32", "deepseek_v4", "deepseek_v41"),
    *("functionary", "functionary_v32", "functiongemma", "gemma4", "gigachat3", "gigachat31", "glm", "granite"),
    *("granite_20b", "harmony", "hermes", "hunyuan", "hy_v3", "internlm", "kimi_k2", "lfm2", "llama3", "longcat"),
    *("minimax_m2", "mirothinker", "mistral", "nemotron", "olmo3", "phi4_mini", "pythonic", "qwen3_xml", "seed_oss"),
    *("solar_open2", "step3", "xlam"),
)
# "auto", "none", or a format of `quire.text.reasoning`.
REASONING_PARSERS = (
    *("auto", "none", "apertus", "apriel", "cohere", "gemma4", "granite", "harmony", "kimi_vl", "minimax_m3"),
    *("mistral", "seed_oss", "solar_open2", "think", "think_answer"),
)
# The name of a header by RFC 9110.
HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

HTTP_ADDRESS = re.compile(r"https?://[^\s/]+(/\S*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Address, access, limits and timeouts of the server.

    Args:
        host: address to listen on; an address other than loopback needs `api_key`.
        port: port to listen on; 0 takes a free one.
        uds: path of a Unix domain socket to listen on, instead of `host` and `port`.
        ssl_certfile: file of the certificate chain, in PEM; None serves without encryption.
        ssl_keyfile: file of its private key, in PEM; None if `ssl_certfile` has the key too.
        default_chat_template_kwargs: variables of the chat template, for requests that do not set them.
        api_key: key of the clients for all routes except `/health`, `/ping` and the page; None admits the users of this
            machine.
        operator_key: key for all routes, including routes of operation; None opens these to clients with `api_key`.
        allow_origins: web origins whose pages may call the server; none by default.
        tenant_header: header in which a gateway names the tenant; None if all clients are one tenant.
        tool_call_parser: format of the model's tool calls, also by vLLM's name; "auto" detects it in the chat template.
        reasoning_parser: format of the model's thinking, also by vLLM's name; "auto" detects it in the chat template,
            "none" leaves thinking in the content.
        reasoning_content: True to send reasoning as `reasoning_content` too, for older clients.
        allow_runtime_lora_updating: True to let operators load adapters from folders of this machine while it serves.
        max_body_bytes: maximum length of a request body. None takes 8 MiB, or 64 MiB for a model that reads images, and
            in front of other servers.
        max_prompts: maximum number of prompts in one request.
        max_request_logprobs: maximum number of log probabilities in the answer to one request.
        max_connections: maximum number of connections; None for as many as the limit of open files allows, at most
            8,192.
        receive_timeout_s: time limit for a request to arrive; a long one has a second more for each 16 KiB.
        send_timeout_s: time limit for a client to read some of the data that is sent to it.
        keep_alive_timeout_s: time that a connection stays open after an answer, for the next request.
        drain_timeout_s: time limit for running requests while the server stops.
        ping_interval_s: silence on a stream after which a comment keeps the connection open.
        log_requests: True to log a line for each request.
        log_prompts: number of leading characters of a request's prompts in its line; 0 for none.
        otlp_traces_endpoint: address to which a span of each request is sent; None traces nothing.
        log_interval_s: interval of the throughput line; 0 never logs it.
        watch: True to show the block map in the terminal.

    Raises:
        ConfigError: a value is not allowed, or an open address has no key.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    operator_key: str | None = field(default=None, repr=False)
    allow_origins: tuple[str, ...] = ()
    tenant_header: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    reasoning_content: bool = False
    allow_runtime_lora_updating: bool = False
    max_body_bytes: int | None = None
    max_prompts: int = 256
    max_request_logprobs: int = DEFAULT_MAX_REQUEST_LOGPROBS
    max_connections: int | None = None
    receive_timeout_s: float = 30.0
    send_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0
    ping_interval_s: float = 15.0
    log_interval_s: float = 10.0
    log_requests: bool = False
    log_prompts: int = 0
    otlp_traces_endpoint: str | None = None
    watch: bool = False

    @property
    def scheme(self) -> str:
        """Scheme of the server's address."""
        return "http" if self.ssl_certfile is None else "https"

    def body_limit(self, *, reads_images: bool) -> int:
        """Return the maximum length of a request body."""
        if self.max_body_bytes is not None:
            return self.max_body_bytes
        return DEFAULT_MAX_IMAGE_BODY_BYTES if reads_images else DEFAULT_MAX_BODY_BYTES

    def __post_init__(self) -> None:
        _within("port", self.port, 0, 65535)
        if self.max_body_bytes is not None:
            _within("max_body_bytes", self.max_body_bytes, 1, 1 << 40)
        _within("max_prompts", self.max_prompts, 1, 1 << 20)
        _within("max_request_logprobs", self.max_request_logprobs, 0, 1 << 40)
        _within("log_prompts", self.log_prompts, 0, 1 << 20)
        if self.log_prompts and not self.log_requests:
            raise ConfigError("log_prompts needs log_requests", field="log_prompts")
        if self.otlp_traces_endpoint is not None and not HTTP_ADDRESS.fullmatch(self.otlp_traces_endpoint):
            raise ConfigError(
                f"otlp_traces_endpoint must be an address like http://127.0.0.1:4318/v1/traces, "
                f"got {self.otlp_traces_endpoint!r}",
                field="otlp_traces_endpoint",
            )
        if self.max_connections is not None:
            _within("max_connections", self.max_connections, 1, 1 << 20)
        _within("receive_timeout_s", self.receive_timeout_s, 0.1, 86400)
        _within("send_timeout_s", self.send_timeout_s, 0.1, 86400)
        _within("keep_alive_timeout_s", self.keep_alive_timeout_s, 0.1, 86400)
        _within("drain_timeout_s", self.drain_timeout_s, 0, 86400)
        _within("ping_interval_s", self.ping_interval_s, 0.001, 86400)
        _within("log_interval_s", self.log_interval_s, 0, 86400)
        for name, parsers in (("tool_call_parser", TOOL_CALL_PARSERS), ("reasoning_parser", REASONING_PARSERS)):
            try:
                object.__setattr__(self, name, find_parser(name, getattr(self, name), parsers))
            except InvalidParameter as error:
                raise ConfigError(str(error), field=name) from None
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
        if not isinstance(self.default_chat_template_kwargs, Mapping):
            raise ConfigError(
                f"default_chat_template_kwargs must be a JSON object, got {shown(self.default_chat_template_kwargs)}",
                field="default_chat_template_kwargs",
            )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile needs ssl_certfile, the certificate of that key", field="ssl_keyfile")
        if self.api_key is None and self.uds is None and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from other machines, which needs an API key: "
                "set --api-key (or QUIRE_API_KEY), or listen on 127.0.0.1",
                field="host",
            )


def is_loopback(host: str) -> bool:
    """Return whether an address is loopback; names other than localhost count as open."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _within(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{name} must be from {low:g} to {high:g}, got {value!r}", field=name)
