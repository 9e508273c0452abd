"""Options of a server: its address and the limits on connections, which the proxy has too, and all other options."""

from __future__ import annotations

import argparse
import json
import os

from quire.cli import options
from quire.server.settings import (
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_IMAGE_BODY_BYTES,
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ServerConfig,
)


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `quire serve` that are not options of the engine."""
    group = parser.add_argument_group("server options")
    defaults = ServerConfig()
    add_address(group, defaults.port)
    group.add_argument(
        "--default-chat-template-kwargs",
        type=options.json_object,
        default={},
        metavar="JSON",
        help="default variables of the chat template, for requests that do not set them (default: {})",
    )
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="number of servers on this machine behind one address, with cache-aware routing (default 1)",
    )
    _add_access(group)
    add_connection_limits(group)
    _add_formats(group, defaults)
    group.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="allow operators to load adapters from local folders, by /v1/load_lora_adapter",
    )
    _add_bounds(group, defaults)
    group.add_argument("--watch", action="store_true", help="show the block map in the terminal; 2>FILE moves the log")
    _add_logs(group)
    add_log_level(group)


def add_address(group: argparse._ActionsContainer, port: int) -> None:
    """Add the options of the address and of encrypted connections."""
    host = ServerConfig().host
    group.add_argument("--host", default=host, help=f"address to listen on; an open one needs a key (default {host})")
    group.add_argument(
        "--port",
        type=int,
        default=port,
        metavar="N",
        help=f"port to listen on; 0 takes a free one, and prints it (default {port})",
    )
    group.add_argument(
        "--uds", metavar="PATH", help="Unix domain socket to listen on, in place of host and port (default: none)"
    )
    group.add_argument(
        "--ssl-certfile", metavar="FILE", help="certificate chain, in PEM, for encrypted connections (default: none)"
    )
    group.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help="private key of the certificate; by default in the same file as the certificate",
    )


def add_log_level(group: argparse._ActionsContainer) -> None:
    """Add the option of the minimum log level."""
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="minimum level of log messages (default info)",
    )


def _add_formats(group: argparse._ArgumentGroup, defaults: ServerConfig) -> None:
    """Add the formats of tool calls and of thinking; the configuration checks their names, including vLLM's."""
    group.add_argument(
        "--tool-call-parser",
        metavar="{" + ",".join(TOOL_CALL_PARSERS) + "}",
        default=defaults.tool_call_parser,
        help="format of the model's tool calls; auto detects it in the chat template (default auto)",
    )
    group.add_argument(
        "--reasoning-parser",
        metavar="{" + ",".join(REASONING_PARSERS) + "}",
        default=defaults.reasoning_parser,
        help="format of the model's reasoning; auto detects it in the chat template, none leaves it in the content "
        "(default auto)",
    )
    group.add_argument(
        "--reasoning-content",
        action="store_true",
        help="send reasoning as reasoning_content too, for older clients",
    )


def _add_logs(group: argparse._ArgumentGroup) -> None:
    """Add the options of logs and traces."""
    group.add_argument(
        "--log-requests",
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log a line for each request: id, route, status, time, tokens, finish reason",
    )
    group.add_argument(
        "--log-prompts",
        type=int,
        default=0,
        metavar="N",
        help="maximum characters of the prompts in the log line of a request; 0 for none (default 0)",
    )
    group.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="json writes each record as a line of JSON (default text)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        metavar="URL",
        help="address of an OpenTelemetry collector for a span of each request, such as "
        "http://127.0.0.1:4318/v1/traces; needs the extra otel (default: none)",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    """Add the options of access control."""
    group.add_argument(
        "--api-key",
        default=os.environ.get("QUIRE_API_KEY"),
        metavar="KEY",
        help="API key of clients; QUIRE_API_KEY sets it without showing it to other users of this machine "
        "(default: none)",
    )
    group.add_argument(
        "--operator-key",
        default=os.environ.get("QUIRE_OPERATOR_KEY"),
        metavar="KEY",
        help="API key for all routes, including those of metrics, status, pins and resets; QUIRE_OPERATOR_KEY sets it "
        "(default: none)",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help='allowed web origin (CORS), like "https://example.org"; may be repeated (default: none)',
    )
    group.add_argument("--allowed-origins", type=_origins, default=[], help=argparse.SUPPRESS)
    group.add_argument(
        "--tenant-header",
        metavar="NAME",
        help="header set by a gateway: only requests with the same value share cached prefixes (default: none)",
    )


def _origins(text: str) -> list[str]:
    """Parse vLLM's form of origins, a JSON list."""
    try:
        origins = json.loads(text)
    except ValueError:
        origins = None
    if not isinstance(origins, list) or not all(isinstance(origin, str) for origin in origins):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON list of texts")
    return origins


def add_connection_limits(group: argparse._ActionsContainer) -> None:
    """Add the limits on connections and bodies, and the time limit of a stop."""
    defaults = ServerConfig()
    _add_times(
        group,
        ("--receive-timeout", defaults.receive_timeout_s, "seconds to receive a request; more for a long one"),
        ("--send-timeout", defaults.send_timeout_s, "seconds for a client to read a part of its response"),
        ("--keep-alive-timeout", defaults.keep_alive_timeout_s, "seconds to keep a connection without a request open"),
        ("--drain-timeout", defaults.drain_timeout_s, "seconds for running requests when the server stops"),
    )
    group.add_argument(
        "--max-body-bytes",
        type=options.parse_size,
        default=defaults.max_body_bytes,
        metavar="SIZE",
        help=f"maximum size of a request body (default {options.shown_size(DEFAULT_MAX_BODY_BYTES)}, or "
        f"{options.shown_size(DEFAULT_MAX_IMAGE_BODY_BYTES)} for a model that reads images and for a router)",
    )
    group.add_argument(
        "--max-connections",
        type=int,
        default=defaults.max_connections,
        metavar="N",
        help="maximum open connections (default: the limit of open files, 8192 at most)",
    )


def _add_times(group: argparse._ActionsContainer, *rows: tuple[str, float, str]) -> None:
    """Add options in seconds: the flag, the default and the meaning of each."""
    for flag, default, meaning in rows:
        group.add_argument(flag, type=float, default=default, metavar="S", help=f"{meaning} (default {default:g})")


def _add_bounds(group: argparse._ArgumentGroup, defaults: ServerConfig) -> None:
    """Add the intervals of streams and logs, and the limits on requests."""
    _add_times(
        group,
        ("--ping-interval", defaults.ping_interval_s, "seconds without data before a stream sends a comment"),
        ("--log-interval", defaults.log_interval_s, "seconds between log lines with the throughput; 0 for none"),
    )
    for flag, default, help_text in (
        ("--max-prompts", defaults.max_prompts, f"maximum prompts per request (default {defaults.max_prompts})"),
        (
            "--max-request-logprobs",
            defaults.max_request_logprobs,
            f"maximum log probabilities in the response to a request (default {defaults.max_request_logprobs})",
        ),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=help_text)


def read_server_config(args: argparse.Namespace) -> ServerConfig:
    """Return the values of the options of `add_server_options`."""
    return ServerConfig(
        host=args.host,
        port=args.port,
        uds=args.uds,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        default_chat_template_kwargs=args.default_chat_template_kwargs,
        api_key=args.api_key,
        operator_key=args.operator_key,
        allow_origins=(*args.allow_origin, *args.allowed_origins),
        tenant_header=args.tenant_header,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        reasoning_content=args.reasoning_content,
        allow_runtime_lora_updating=args.allow_runtime_lora_updating,
        max_body_bytes=args.max_body_bytes,
        max_prompts=args.max_prompts,
        max_request_logprobs=args.max_request_logprobs,
        max_connections=args.max_connections,
        receive_timeout_s=args.receive_timeout,
        send_timeout_s=args.send_timeout,
        keep_alive_timeout_s=args.keep_alive_timeout,
        drain_timeout_s=args.drain_timeout,
        ping_interval_s=args.ping_interval,
        log_interval_s=args.log_interval,
        log_requests=args.log_requests,
        log_prompts=args.log_prompts,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        watch=args.watch,
    )
