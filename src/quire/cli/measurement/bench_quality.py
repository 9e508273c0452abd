"""`quire bench quality`: compares a served form of a model with exact values: KL divergence, perplexity, agreement."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.early_checks import checked_engine_options
from quire.cli.measurement.workload import count
from quire.cli.options import add_engine_options

if TYPE_CHECKING:
    from quire.cli.options import Subparsers

NAME = "bench quality"


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        NAME,
        help="measure what a quantisation, a dtype or kernels cost in quality",
        description="Compare the probabilities that a model is served with to the exact ones: those of the same "
        "weights, dequantised, in float32. Reports the KL divergence over the whole vocabulary, the perplexity, how "
        "often the likeliest token is the same and, with --greedy, how far greedy outputs agree. All options of an "
        "engine apply to the served form.",
    )
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="text to read, plain or .jsonl (text or messages); by default ours")
    add("--tokens", type=count, default=0, metavar="N", help="most tokens of the text that are read; by default all")
    add(
        "--reference",
        metavar="MODEL",
        help="checkpoint whose exact values count, such as the one that MODEL was quantised from; by default MODEL",
    )
    add(
        "--greedy",
        type=_greedy,
        metavar="PxN",
        help="compare greedy outputs of N tokens after P prompts from the text as well, such as 20x32",
    )
    add("--json", action="store_true", help="print one JSON object")
    add_engine_options(parser)
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        QuireError: an option, a model or the text is refused.
    """
    from quire.measurement.bench.quality_text import bundled_prompts
    from quire.text.documents import read_text

    options = checked_engine_options(args)
    if args.text is not None:
        read_text(args.text, "text")
    elif args.greedy is not None:
        bundled_prompts(args.greedy[0])

    from quire.config import EngineConfig
    from quire.measurement.bench.divergence import report_lines
    from quire.measurement.bench.quality import QualityBench

    bench = QualityBench(EngineConfig.from_options(**options), args.reference, args.text, args.tokens)
    try:
        divergence = bench.divergence()
        greedy = None if args.greedy is None else bench.greedy(*args.greedy)
        kernels = bench.served.kernels
    finally:
        bench.close()
    if args.json:
        result = {"model": args.model, "reference": args.reference or args.model, "kernels": kernels}
        result |= {"divergence": asdict(divergence), "greedy": None if greedy is None else asdict(greedy)}
        print(json.dumps(result))
    else:
        print("\n".join((f"kernels          {kernels}", *report_lines(divergence, greedy))))
    return 0


def _greedy(text: str) -> tuple[int, int]:
    """Parse a number of prompts and a number of tokens, such as 20x32."""
    match = re.fullmatch(r"([1-9]\d{0,3})x([1-9]\d{0,3})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers of prompts and tokens, 1 to 9999, such as 20x32")
    return int(match[1]), int(match[2])
