"""`quire quantize`: writes a checkpoint quantised, in the format of compressed-tensors or as a GGUF file."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.early_checks import check_model
from quire.cli.quantization.output import check_new
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.options import Subparsers

FOLDERS = ("int4", "int8")
FILES = ("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_k_m", "q4_1", "q4_0")
# Options of int4 by their names in `QuantizeOptions`.
INT4_OPTIONS = {
    "group_size": "--group-size",
    "symmetric": "--asymmetric",
    "method": "--method",
    "calibration": "--calibration",
    "calibration_tokens": "--calibration-tokens",
}


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
    parser.add_argument("--num-threads", type=int, metavar="N", help="CPU threads; all cores by default")
    # Options that are not given are absent: they are refused for other forms.
    add = partial(parser.add_argument_group("int4 options").add_argument, default=argparse.SUPPRESS)
    add("--group-size", type=int, choices=(32, 64, 128), help="number of inputs that share a scale; 32 by default")
    add("--asymmetric", action="store_false", dest="symmetric", help="a zero point for each scale")
    add("--method", choices=("calibrated", "rounded"), help="calibrated by default; rounded takes the nearest codes")
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help='text to calibrate on, a document a line; of .jsonl, each line has "text" or "messages". By default, '
        "plain English that comes along",
    )
    add("--calibration-tokens", type=int, metavar="N", help="most tokens of the text that are used; 32768 by default")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    int4_options = {name: value for name, value in vars(args).items() if name in INT4_OPTIONS}
    for name in int4_options:
        flag = INT4_OPTIONS[name]
        if args.to != "int4":
            raise ConfigError(f"{flag} is for int4, not for {args.to}", field=name)
        if int4_options.get("method") == "rounded" and name.startswith("calibration"):
            raise ConfigError(f"--method rounded takes no {flag}", field=name)
    if int4_options.get("calibration_tokens", 1) < 1:
        raise ConfigError(f"--calibration-tokens must be at least 1, got {int4_options['calibration_tokens']}")
    if args.num_threads is not None and args.num_threads < 1:
        raise ConfigError(f"--num-threads must be at least 1, got {args.num_threads}", field="num_threads")
    if args.to in FILES and args.dtype != "auto":
        raise ConfigError(f"--dtype is for int4 and int8; {args.to} has types of its own", field="dtype")

    check_model(args.model, args.revision)
    check_new(args.out)
    if int4_options.get("calibration") is not None:
        from quire.text.documents import read_text

        read_text(args.calibration, "calibration")

    import torch
    from rich.console import Console
    from rich.progress import Progress

    from quire.cli.quantization.quantize import QuantizeOptions, quantize

    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    options = QuantizeOptions(to=args.to, dtype=args.dtype, **int4_options)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("Quantizing", total=None)
        quantize(
            args.model, args.out, options, args.revision, lambda done, all: bar.update(task, completed=done, total=all)
        )
    files = [args.out] if args.out.is_file() else [*args.out.iterdir()]
    print(f"{args.out}: {sum(path.stat().st_size for path in files):,} bytes")
    return 0
