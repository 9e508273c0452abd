"""`quire route`: a proxy for several servers, which routes requests by the contents of their caches."""

from __future__ import annotations

import argparse
import os

from quire.cli.options import add_fields, given_fields
from quire.cli.server_options import add_address, add_connection_limits, add_log_level
from quire.fleet.routing.failure_policy import FailurePolicy
from quire.fleet.routing.router import POLICIES, RouterConfig
from quire.server.http.address import bind_server
from quire.server.settings import ServerConfig

DEFAULT_PORT = 8080
DEFAULT_PROBE_S = 1.0


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "route",
        help="put several servers behind one address, and route by what their caches hold",
        description="Put several servers behind one address. A request goes where it is expected to begin first: "
        "where its prompt is cached, unless the queue there is longer than that saves. Stop with Ctrl-C.",
    )
    parser.add_argument(
        "--to",
        required=True,
        action="append",
        metavar="URL,URL",
        help="addresses of the servers, like http://127.0.0.1:8001,http://127.0.0.1:8002; may be repeated",
    )
    add_address(parser, DEFAULT_PORT)
    parser.add_argument(
        "--api-key",
        default=os.environ.get("QUIRE_API_KEY"),
        metavar="KEY",
        help="key of the clients, the same as at the servers; QUIRE_API_KEY sets it (default: none)",
    )
    parser.add_argument(
        "--operator-key",
        default=os.environ.get("QUIRE_OPERATOR_KEY"),
        metavar="KEY",
        help="key of the operators, the same as at the servers; QUIRE_OPERATOR_KEY sets it (default: none)",
    )
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="where requests go: where they are expected to begin first, by caches and queues; to the shortest queue; "
        f"in turns (default {POLICIES[0]})",
    )
    parser.add_argument(
        "--tenant-header", metavar="NAME", help="header with the tenant, the same as at the servers (default: none)"
    )
    parser.add_argument(
        "--probe-interval",
        type=float,
        default=DEFAULT_PROBE_S,
        metavar="S",
        help=f"seconds between two probes of a server (default {DEFAULT_PROBE_S:g})",
    )
    add_connection_limits(parser)
    add_log_level(parser)
    add_fields(parser.add_argument_group("options for servers that fail"), FailurePolicy)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Route requests until a stop signal arrives.

    Raises:
        ConfigError: an option is unusable.
    """
    import logging

    from quire.errors import ConfigError

    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(message)s", force=True)
    for chatty in ("asyncio", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.ERROR)
    config = ServerConfig(
        host=args.host,
        port=args.port,
        uds=args.uds,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        api_key=args.api_key,
        operator_key=args.operator_key,
        tenant_header=args.tenant_header,
        max_body_bytes=args.max_body_bytes,
        max_connections=args.max_connections,
        receive_timeout_s=args.receive_timeout,
        send_timeout_s=args.send_timeout,
        keep_alive_timeout_s=args.keep_alive_timeout,
        drain_timeout_s=args.drain_timeout,
    )
    if not 0.05 <= args.probe_interval <= 3600:
        raise ConfigError(
            f"probe_interval must be from 0.05 to 3600, got {args.probe_interval!r}", field="probe_interval"
        )
    from quire.fleet.proxy.fleet import Fleet
    from quire.fleet.proxy.lifecycle import serve_proxy

    urls = [url for part in args.to for url in part.split(",") if url]
    policy = FailurePolicy(**given_fields(args, FailurePolicy))
    key = config.operator_key or config.api_key
    fleet = Fleet(urls, key, args.probe_interval, RouterConfig(policy=args.policy), policy)
    with bind_server(config) as listener:
        return serve_proxy(fleet, config, listener)
