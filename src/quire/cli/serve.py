"""`quire serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import argparse
import os

from quire.cli import options
from quire.server.settings import TOOL_CALL_PARSERS, ServerConfig

DEFAULT_MAX_QUEUE_LEN = 1024


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API. Stop with Ctrl-C: running requests finish first.",
    )
    options.add_engine_options(parser)
    group = parser.add_argument_group("server options")
    usual = ServerConfig()
    group.add_argument("--host", default=usual.host, help="address to listen on; an open one needs a key")
    group.add_argument("--port", type=int, default=usual.port, metavar="N", help="0 takes a free one, and prints it")
    _add_access(group)
    _add_times(group, usual)
    group.add_argument(
        "--tool-call-parser",
        choices=TOOL_CALL_PARSERS,
        default=usual.tool_call_parser,
        help="the format in which the model writes calls of tools; auto finds it in the chat template (default auto)",
    )
    _add_bounds(group, usual)
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.set_defaults(handler=run)


def _add_access(group: argparse._ArgumentGroup) -> None:
    """Add the options that say who may do what."""
    group.add_argument(
        "--api-key",
        default=os.environ.get("QUIRE_API_KEY"),
        metavar="KEY",
        help="what clients must show; QUIRE_API_KEY sets it without showing it to other users of this machine",
    )
    group.add_argument(
        "--operator-key",
        default=os.environ.get("QUIRE_OPERATOR_KEY"),
        metavar="KEY",
        help="what opens metrics, status, pins and resets, beside all else; QUIRE_OPERATOR_KEY sets it",
    )
    group.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help='a web origin whose pages may call the server, like "https://example.org"; may be repeated',
    )
    group.add_argument(
        "--tenant-header",
        metavar="NAME",
        help="a header that a gateway in front sets: only requests with the same value share cached prefixes",
    )


def _add_times(group: argparse._ArgumentGroup, usual: ServerConfig) -> None:
    """Add the options in seconds."""
    for flag, default, help_text in (
        ("--receive-timeout", usual.receive_timeout_s, "seconds in which a request must arrive; more for a long one"),
        ("--send-timeout", usual.send_timeout_s, "seconds in which a client must take some of its answer"),
        ("--keep-alive-timeout", usual.keep_alive_timeout_s, "seconds that a connection may stay without a request"),
        ("--drain-timeout", usual.drain_timeout_s, "seconds that requests may run on when stopping"),
        ("--ping-interval", usual.ping_interval_s, "seconds of silence before a stream sends a comment"),
        ("--log-interval", usual.log_interval_s, "seconds between throughput lines; 0 for none"),
    ):
        group.add_argument(flag, type=float, default=default, metavar="S", help=f"{help_text} (default {default:g})")


def _add_bounds(group: argparse._ArgumentGroup, usual: ServerConfig) -> None:
    """Add the options that bound what clients may ask for."""
    group.add_argument(
        "--max-body-bytes", type=options.parse_size, default=usual.max_body_bytes, metavar="SIZE", help="longest body"
    )
    for flag, default, help_text in (
        ("--max-prompts", usual.max_prompts, f"most prompts in one request (default {usual.max_prompts})"),
        (
            "--max-request-logprobs",
            usual.max_request_logprobs,
            f"most log probabilities in the answer to one request (default {usual.max_request_logprobs})",
        ),
        (
            "--max-connections",
            usual.max_connections,
            "connections at a time (default: what the limit of open files leaves, 8192 at most)",
        ),
    ):
        group.add_argument(flag, type=int, default=default, metavar="N", help=help_text)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal says stop, or the engine has died.

    Raises:
        ConfigError: an option that cannot be honoured.
    """
    import logging

    from quire.config import EngineConfig

    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", force=True)
    for chatty in ("asyncio", "httpx"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    # It warns of each request that is not HTTP, and anybody can send thousands.
    logging.getLogger("uvicorn").setLevel(logging.ERROR)
    server_config = ServerConfig(
        host=args.host,
        port=args.port,
        api_key=args.api_key,
        operator_key=args.operator_key,
        allow_origins=tuple(args.allow_origin),
        tenant_header=args.tenant_header,
        tool_call_parser=args.tool_call_parser,
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
    )
    if "*" in server_config.allow_origins and server_config.api_key is None:
        logging.warning("--allow-origin '*' without --api-key: every page that a browser here opens can use the server")
    # Offline the queue is the user's own; a server's is anybody's, so it ends somewhere.
    given = {"max_queue_len": DEFAULT_MAX_QUEUE_LEN, **options.engine_options(args)}
    engine_config = EngineConfig.from_options(**given)
    # After all that can be wrong with the options: this imports the engine.
    from quire.server.lifecycle import serve

    return serve(engine_config, server_config)
