"""`quire quantize`: writes a checkpoint quantised, in the format of compressed-tensors or as a GGUF file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.options import Subparsers

FOLDERS = ("int4", "int8")
FILES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_k_m", "q4_1", "q4_0")


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "quantize",
        help="write a checkpoint quantised",
        description="Write a checkpoint of 16 or 32 bits quantised: int4 and int8 as a folder in the format of "
        "compressed-tensors, all others as a GGUF file. Codes of int4 are calibrated: they are those that change the "
        "outputs of layers least on a text. Nothing is overwritten, and the output is written whole or not at all.",
    )
    parser.add_argument("model", metavar="MODEL", help='folder, hub id or "bundled"')
    parser.add_argument("out", metavar="OUT", type=Path, help="folder or file to make")
    parser.add_argument("--to", required=True, choices=FOLDERS + FILES, help="form of the weights")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float16", "float32"),
        help="dtype of scales and of what int4 and int8 leave; that of the checkpoint by default",
    )
    group = parser.add_argument_group("int4 options")
    group.add_argument(
        "--group-size", type=int, default=32, choices=(32, 64, 128), help="number of inputs that share a scale"
    )
    group.add_argument("--asymmetric", action="store_true", help="a zero point for each scale")
    group.add_argument(
        "--method", default="calibrated", choices=("calibrated", "rounded"), help="rounded takes the nearest codes"
    )
    group.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='text to calibrate on, a document a line; of .jsonl, each line has "text" or "messages". By default, '
        "plain English that comes along",
    )
    group.add_argument(
        "--calibration-tokens", type=int, default=32768, metavar="N", help="most tokens of the text that are used"
    )
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.to != "int4" and (args.calibration is not None or args.asymmetric):
        raise ConfigError(f"--calibration and --asymmetric are for int4, not for {args.to}", field="to")
    if args.to in FILES and args.dtype != "auto":
        raise ConfigError(f"--dtype is for int4 and int8; {args.to} has types of its own", field="dtype")
    if args.method == "rounded" and args.calibration is not None:
        raise ConfigError("--method rounded takes no --calibration", field="method")
    if args.calibration_tokens < 1:
        raise ConfigError(f"--calibration-tokens must be at least 1, got {args.calibration_tokens}")

    from rich.console import Console
    from rich.progress import Progress

    from quire.quantization.quantize import QuantizeOptions, quantize

    options = QuantizeOptions(
        to=args.to,
        method=args.method,
        group_size=args.group_size,
        symmetric=not args.asymmetric,
        dtype=args.dtype,
        calibration=args.calibration,
        calibration_tokens=args.calibration_tokens,
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("Quantizing", total=None)
        quantize(
            args.model, args.out, options, args.revision, lambda done, all: bar.update(task, completed=done, total=all)
        )
    return 0
