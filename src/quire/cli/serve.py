"""`quire serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import argparse
import json
import os

from quire.cli import options
from quire.cli.early_checks import check_files
from quire.errors import ConfigError
from quire.server.address import bind, bind_unix, tls_context
from quire.server.settings import REASONING_PARSERS, TOOL_CALL_PARSERS, ServerConfig

DEFAULT_MAX_QUEUE_LEN = 1024


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API. Stop with Ctrl-C: running requests finish first.",
    )
    options.add_engine_options(parser, has_foreign=False)
    group = parser.add_argument_group("server options")
    defaults = ServerConfig()
    _add_address(group, defaults)
    group.add_argument(
        "--default-chat-template-kwargs",
        type=options.json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template, for requests that do not set them (default: {})",
    )
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="servers on this machine behind one address, which routes by what their caches hold (default 1)",
    )
    _add_access(group)
    _add_times(group, defaults)
    _add_formats(group, defaults)
    group.add_argument(
        "--allow-runtime-lora-updating",
        action="store_true",
        help="let operators load adapters from folders of this machine, by /v1/load_lora_adapter",
    )
    _add_bounds(group, defaults)
    group.add_argument("--watch", action="store_true", help="show the block map in the terminal; 2>FILE moves the log")
    _add_logs(group)
    options.add_foreign_options(parser)
    parser.set_defaults(handler=run)


def _add_address(group: argparse._ArgumentGroup, defaults: ServerConfig) -> None:
    """Add the options of the address, and of encrypted connections."""
    group.add_argument(
        "--host",
        default=defaults.host,
        help=f"address to listen on; an open one needs a key (default {defaults.host})",
    )
    group.add_argument(
        "--port",
        type=int,
        default=defaults.port,
        metavar="N",
        help=f"port to listen on; 0 takes a free one, and prints it (default {defaults.port})",
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


def _add_formats(group: argparse._ArgumentGroup, defaults: ServerConfig) -> None:
    """Add the formats of tool calls and of thinking."""
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default=defaults.tool_call_parser,
        help="format of the model's tool calls; auto detects it in the chat template (default auto)",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default=defaults.reasoning_parser,
        help="format of the model's thinking; auto detects it in the chat template, none leaves it in the content "
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
        action="store_true",
        help="log a line for each request: id, route, status, time, tokens, finish reason",
    )
    group.add_argument(
        "--log-prompts",
        type=int,
        default=0,
        metavar="N",
        help="characters of a request's prompts in its line; 0 for none (default 0)",
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
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least level of what is logged (default info)",
    )


def _add_access(group: argparse._ArgumentGroup) -> None:
    """Add the options of access control."""
    group.add_argument(
        "--api-key",
        default=os.environ.get("QUIRE_API_KEY"),
        metavar="KEY",
        help="key of the clients; QUIRE_API_KEY sets it without showing it to other users of this machine "
        "(default: none)",
    )
    group.add_argument(
        "--operator-key",
        default=os.environ.get("QUIRE_OPERATOR_KEY"),
        metavar="KEY",
        help="key for all routes, those of metrics, status, pins and resets included; QUIRE_OPERATOR_KEY sets it "
        "(default: none)",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help='a web origin whose pages may call the server, like "https://example.org"; may be repeated '
        "(default: none)",
    )
    group.add_argument("--allowed-origins", type=_origins, default=[], help=argparse.SUPPRESS)
    group.add_argument(
        "--tenant-header",
        metavar="NAME",
        help="a header that a gateway sets: only requests with the same value share cached prefixes (default: none)",
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


def _add_times(group: argparse._ArgumentGroup, defaults: ServerConfig) -> None:
    """Add the options in seconds."""
    for flag, default, help_text in (
        ("--receive-timeout", defaults.receive_timeout_s, "seconds for a request to arrive; more for a long one"),
        ("--send-timeout", defaults.send_timeout_s, "seconds for a client to read some of its answer"),
        ("--keep-alive-timeout", defaults.keep_alive_timeout_s, "seconds for a connection without a request"),
        ("--drain-timeout", defaults.drain_timeout_s, "seconds for running requests when the server stops"),
        ("--ping-interval", defaults.ping_interval_s, "seconds of silence before a stream sends a comment"),
        ("--log-interval", defaults.log_interval_s, "seconds between throughput lines; 0 for none"),
    ):
        group.add_argument(flag, type=float, default=default, metavar="S", help=f"{help_text} (default {default:g})")


def _add_bounds(group: argparse._ArgumentGroup, defaults: ServerConfig) -> None:
    """Add the limits on requests and connections."""
    size = options.parse_size
    group.add_argument(
        "--max-body-bytes",
        type=size,
        default=defaults.max_body_bytes,
        metavar="SIZE",
        help=f"longest body of a request (default {options.shown_size(defaults.max_body_bytes)})",
    )
    for flag, default, help_text in (
        (
            "--api-server-count",
            defaults.api_server_count,
            "processes that speak HTTP beside the engine's; 0 for none, needs the extra fronts (default 0)",
        ),
        ("--max-prompts", defaults.max_prompts, f"maximum of prompts in a request (default {defaults.max_prompts})"),
        (
            "--max-request-logprobs",
            defaults.max_request_logprobs,
            f"maximum of log probabilities in the answer to a request (default {defaults.max_request_logprobs})",
        ),
        (
            "--max-connections",
            defaults.max_connections,
            "maximum of open connections (default: the limit of open files, 8192 at most)",
        ),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal arrives or the engine has died.

    Raises:
        ConfigError: an option is unusable.
    """
    import logging

    from quire.config import EngineConfig
    from quire.server.log_setup import set_up_log

    set_up_log(args.log_level.upper(), is_json=args.log_format == "json")
    server_config = ServerConfig(
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
        api_server_count=args.api_server_count,
    )
    if "*" in server_config.allow_origins and server_config.api_key is None:
        logging.warning("--allow-origin '*' without --api-key: every page that a browser here opens can use the server")
    # Offline the queue is the user's own and unlimited; a server's is limited.
    given = {"max_queue_len": DEFAULT_MAX_QUEUE_LEN, **options.engine_options(args)}
    engine_config = EngineConfig.from_options(**given)
    if engine_config.lora.merge_lora and server_config.allow_runtime_lora_updating:
        raise ConfigError(
            "--allow-runtime-lora-updating loads adapters beside the model, and merge_lora leaves no model for that: "
            "leave one of them out",
            field="allow_runtime_lora_updating",
        )
    check_files(engine_config)
    if engine_config.parallel.tensor_parallel_size > 1:
        from quire.distributed.torchrun import torchrun_place

        place = torchrun_place(engine_config.parallel)
        if place is not None and place.rank > 0:
            from quire.engine.startup.loading import load

            load(engine_config)  # the process ends there, with rank 0, which serves
    # The address comes before the engine, whose import takes seconds, and the model, which may take minutes.
    tls_context(server_config.ssl_certfile, server_config.ssl_keyfile)  # refuses unusable files early
    uds = server_config.uds
    with bind(server_config.host, server_config.port) if uds is None else bind_unix(uds) as listener:
        if args.replicas != 1:
            from quire.serving.local_fleet import serve_replicas

            return serve_replicas(args.arguments, args.replicas, server_config, listener)
        from quire.server.lifecycle import serve

        return serve(engine_config, server_config, listener)
