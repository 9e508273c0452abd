"""`quire bench serve`: puts a running server under load and reports throughput, latencies and failures."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import sys
from dataclasses import asdict
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from quire.cli.measurement.workload import add_shape_options, count, given_shape
from quire.errors import ConfigError
from quire.measurement.bench.workloads import SyntheticWorkload

if TYPE_CHECKING:
    from quire.cli.options import Subparsers
    from quire.measurement.bench.client import Client
    from quire.measurement.bench.load import Load
    from quire.measurement.bench.trace import TracedRequest

NAME = "bench serve"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
# Fields of a workload's shape that apply to a trace too.
SHAPE_FIELDS_OF_TRACES = ("num_prompts", "workload_seed")
# Synthetic prompts skip the first ids of a vocabulary, which are often special tokens.
MAX_FIRST_ID = 256


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        NAME,
        help="measure a running server under load",
        description="Send completions to a server with OpenAI's API, Quire's or another, at a rate or with a fixed "
        "concurrency, and report throughput, latencies and failures. Requests are synthetic, or read from a file. "
        "Ctrl-C reports the results so far.",
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="address of the server (default %(default)s)")
    add("--model", metavar="NAME", help="model of the requests; needed where the server has several")
    add(
        "--api-key",
        default=os.environ.get("QUIRE_API_KEY"),
        metavar="KEY",
        help="key of the server; QUIRE_API_KEY sets it without showing it to other users of this machine",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--rate",
        type=_rate,
        metavar="R",
        help="requests a second on average, arriving by a Poisson process; inf sends all at once, which is the default",
    )
    load.add_argument("--concurrency", type=count, metavar="C", help="number of running requests, instead of a rate")
    add(
        "--trace",
        metavar="FILE",
        help="send the requests of a file with one JSON object a line: prompt (text), prompt_token_ids or messages; "
        "max_tokens; and arrival_s, in seconds, which --rate and --concurrency override",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="request outputs of full length; on for synthetic requests, off for those of a file",
    )
    add(
        "--vocab-size",
        type=count,
        default=1000,
        metavar="N",
        help="token ids of synthetic prompts lie below (default %(default)s), in the range of every vocabulary",
    )
    add("--timeout", type=_seconds, default=600.0, metavar="S", help="seconds for a whole answer (default %(default)g)")
    add("--slo-ttft", type=_seconds, metavar="S", help="target of the time to the first token")
    add("--slo-itl", type=_seconds, metavar="S", help="target of the mean time between the tokens of a request")
    add("--json", action="store_true", help="print one JSON object")
    add_shape_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        QuireError: an option or a line of the trace is wrong, or the server does not answer.
    """
    from quire.measurement.bench.client import Client
    from quire.measurement.bench.http_client import Endpoint
    from quire.measurement.bench.load_report import Targets, load_lines, summarise

    shape_fields, endpoint = given_shape(args), Endpoint.parse(args.url)
    shape = SyntheticWorkload(**shape_fields)
    traced = None if args.trace is None else _traced(args.trace, shape_fields)
    ignore_eos = traced is None if args.ignore_eos is None else args.ignore_eos
    client = Client(endpoint, model=args.model, api_key=args.api_key, timeout_s=args.timeout, ignore_eos=ignore_eos)
    load, described = asyncio.run(_drive(args, client, shape, traced))
    targets = Targets(args.slo_ttft, args.slo_itl)
    report = summarise(load, targets)
    if args.json:
        run_info = {"url": endpoint.url, "model": client.model, "load": described}
        print(json.dumps({**run_info, "report": asdict(report), "targets": targets._asdict()}))
    else:
        print("\n".join(load_lines(report, targets)))
    if load.is_interrupted:
        return EXIT_INTERRUPTED
    if not report.completed:
        print(f"quire: error: none of the {report.num_requests:,} requests succeeded", file=sys.stderr)
        return EXIT_FAILED
    return 0


async def _drive(
    args: argparse.Namespace, client: Client, shape: SyntheticWorkload, traced: list[TracedRequest] | None
) -> tuple[Load, dict[str, Any]]:
    """Check the server, send all requests, and return the results and the description of the load."""
    from quire.measurement.bench.load import poisson_arrivals, send_at, send_in_turn

    await client.check()
    if traced is None:
        synthetic = shape.requests(range(min(MAX_FIRST_ID, args.vocab_size // 2), args.vocab_size))
        # The reversed end of a prompt, since its beginning would be in the server's prefix cache.
        await client.choose_form(synthetic[0].prompt[:-9:-1])
        requests = [client.synthetic(request) for request in synthetic]
        form = "prompts as token ids" if client.takes_ids else "prompts as text, since the server takes no token ids"
    else:
        requests, form = traced, f"requests of {args.trace}"
    described: dict[str, Any] = {"trace": args.trace} if args.trace else {**asdict(shape), "as_ids": client.takes_ids}
    described |= {"num_prompts": len(requests), "rate": None, "concurrency": args.concurrency}
    described["ignore_eos"] = client.ignores_eos
    if args.concurrency is not None:
        arrivals, pace = None, f"{args.concurrency} at a time"
    elif args.rate is None and requests[0].arrival_s is not None:
        requests = sorted(requests, key=attrgetter("arrival_s"))
        first_s = requests[0].arrival_s or 0.0
        arrivals, pace = [(request.arrival_s or 0.0) - first_s for request in requests], "at the times of the file"
    else:
        rate = math.inf if args.rate is None else args.rate
        arrivals = poisson_arrivals(rate, len(requests), shape.workload_seed)
        pace = "all at once" if math.isinf(rate) else f"{rate:g} a second on average"
        described["rate"] = str(rate) if math.isinf(rate) else rate
    if not args.json:
        eos = ", past the end-of-sequence token" if client.ignores_eos else ""
        print(f"{client.endpoint.url}, model {client.model}: {form}{eos}")
        print(f"{len(requests):,} requests, {pace}\n", flush=True)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    # `loop.add_signal_handler` does not exist on Windows.
    default = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(_stop_once, stop, default))
    if arrivals is None:
        return await send_in_turn(client, requests, args.concurrency, stop), described
    return await send_at(client, requests, arrivals, stop), described


def _stop_once(stop: asyncio.Event, default: Any) -> None:
    """Stop sending at the first Ctrl-C; the second one ends the process as usual."""
    stop.set()
    signal.signal(signal.SIGINT, default)


def _traced(path: str, shape_fields: dict[str, Any]) -> list[TracedRequest]:
    from quire.measurement.bench.trace import read_trace

    shaping = next((name for name in shape_fields if name not in SHAPE_FIELDS_OF_TRACES), None)
    if shaping is not None:
        flag = "--" + shaping.replace("_", "-")
        raise ConfigError(f"{flag} shapes synthetic requests, not those of --trace", field=shaping)
    requests = read_trace(path)
    wanted = shape_fields.get("num_prompts", len(requests))
    if wanted > len(requests):
        raise ConfigError(
            f"num_prompts must be at most {len(requests)}, which {path} has, got {wanted}", field="num_prompts"
        )
    return requests[:wanted]


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not rate > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests a second above 0, or inf")
    return rate


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
