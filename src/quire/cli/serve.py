"""`quire serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import argparse

from quire.cli import options
from quire.cli.early_checks import check_files
from quire.cli.server_options import add_server_options, read_server_config
from quire.errors import ConfigError
from quire.fleet.routing.failure_policy import FailurePolicy
from quire.server.http.address import bind_server
from quire.server.log_setup import LogSettings

DEFAULT_MAX_QUEUE_LEN = 1024


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP, with OpenAI's API",
        description="Serve a model over HTTP, with OpenAI's API. Stop with Ctrl-C: running requests finish first.",
    )
    add_server_options(parser)
    options.add_engine_options(parser, has_foreign=False)
    options.add_fields(parser.add_argument_group("options of --replicas for servers that fail"), FailurePolicy)
    options.add_foreign_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal arrives or the engine has died.

    Raises:
        ConfigError: an option is unusable.
    """
    import logging

    from quire.config import EngineConfig

    log = LogSettings(level=args.log_level, is_json=args.log_format == "json")
    log.apply()
    server_config = read_server_config(args)
    if "*" in server_config.allow_origins and server_config.api_key is None:
        logging.warning("--allow-origin '*' without --api-key: every page that a browser here opens can use the server")
    # The queue of an offline engine is unlimited; the queue of a server is limited.
    engine_options = {"max_queue_len": DEFAULT_MAX_QUEUE_LEN, **options.engine_options(args)}
    engine_config = EngineConfig.from_options(**engine_options)
    if engine_config.lora.merge_lora and server_config.allow_runtime_lora_updating:
        raise ConfigError(
            "--allow-runtime-lora-updating loads adapters beside the model, and merge_lora leaves no model for that: "
            "leave one of them out",
            field="allow_runtime_lora_updating",
        )
    failure_options = options.given_fields(args, FailurePolicy)
    if failure_options and args.replicas == 1:
        field, value = next(iter(failure_options.items()))
        raise ConfigError(f"{field} is an option of several servers: give --replicas too, got {value!r}", field=field)
    place = None
    if engine_config.parallel.num_ranks > 1:
        from quire.distributed.torchrun import torchrun_place

        place = torchrun_place(engine_config.parallel)
        if place is not None and args.replicas != 1:
            raise ConfigError(
                f"replicas must be 1 where torchrun starts the ranks of one server, got {args.replicas}",
                field="replicas",
            )
        if place is not None and place.rank > 0:
            from quire.engine.startup.start import load

            load(engine_config)  # serves plans of rank 0 until rank 0 ends, and then exits
    if place is None:  # the ranks of torchrun check files once they are connected, so that each has the error
        check_files(engine_config)
    # The address is bound first, since the import of the engine takes seconds, and loading may take minutes.
    with bind_server(server_config) as listener:
        if args.replicas != 1:
            from quire.fleet.local.fleet import serve_replicas

            policy = FailurePolicy(**failure_options)
            return serve_replicas(args.replicas, engine_config, server_config, log, policy, listener)
        from quire.server.lifecycle import serve

        return serve(engine_config, server_config, listener)
