"""`quire inspect`: reports the content of a checkpoint and the form in which it would be served, without loading it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from quire.cli.early_checks import check_model
from quire.cli.options import Subparsers
from quire.config.options import MODEL_IMPLS
from quire.errors import QuireError, shown

if TYPE_CHECKING:
    from quire.models.checkpoints.checkpoint import Checkpoint
    from quire.models.loading.inspection import EncoderInspection, Inspection
    from quire.text.tokenizers.ends import EndToken

EXIT_REFUSED = 1


def register(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what a checkpoint holds, and how it would be served",
        description="Show the format, the sizes and the types of tensors of a checkpoint, and how each type would be "
        "served, and the tokens that end its answers. No weights are read. The exit code is 1 where the model would be "
        "refused.",
    )
    parser.add_argument("model", help="folder, GGUF file, hub id, or hub id with a quantisation (ID:Q4_K_M)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--model-impl", default="auto", choices=MODEL_IMPLS, help="what would compute the model")
    parser.add_argument("--mmproj", metavar="FILE", help="GGUF file of the vision encoder of a model in a GGUF file")
    parser.add_argument("--metadata", action="store_true", help="print the fields of a GGUF file as well")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(handler=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    check_model(args.model, args.revision)
    from quire.models.checkpoints.checkpoint import Checkpoint
    from quire.models.loading.inspection import inspect

    checkpoint = Checkpoint.open(args.model, args.revision)
    inspection = inspect(checkpoint, args.model_impl, args.mmproj)
    ends, problem = _read_ends(checkpoint)
    inspection = replace(inspection, problem=inspection.problem or problem)
    if args.json:
        print(json.dumps({**asdict(inspection), "ends": [end._asdict() for end in ends]}, indent=2))
    else:
        print("\n".join(lines(inspection, ends, has_metadata=args.metadata)))
    return EXIT_REFUSED if inspection.problem else 0


def _read_ends(checkpoint: Checkpoint) -> tuple[tuple[EndToken, ...], str]:
    """Return the tokens that end an answer, and the reason why the tokenizer of a GGUF file would be refused, or ""."""
    from quire.config import ModelConfig
    from quire.engine.startup.tokenizers import find_ends, open_tokenizer

    try:
        return find_ends(checkpoint, open_tokenizer(ModelConfig(), checkpoint)), ""
    except QuireError as error:
        # A folder without a tokenizer can be served with another one, or with none.
        return find_ends(checkpoint, None), "" if checkpoint.gguf_fields is None else str(error)


def lines(inspection: Inspection, ends: Collection[EndToken], *, has_metadata: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    from quire.text.tokenizers.ends import describe

    yield f"format        {inspection.format}"
    yield f"architecture  {inspection.architecture}"
    if inspection.model_impl:
        yield f"computed by   {inspection.model_impl}"
    if inspection.num_layers:
        sizes = (
            f"{inspection.num_layers} layers of {inspection.width}, {inspection.vocab_size:,} tokens in the vocabulary"
        )
        yield f"sizes         {sizes}, contexts of up to {inspection.max_position:,} tokens"
    num_values = sum(use.num_values for use in inspection.types)
    yield f"tensors       {num_values:,} values in {inspection.num_bytes:,} bytes"
    if inspection.encoder is not None:
        yield f"images        {_encoder_line(inspection.encoder)}"
    if ends:
        yield f"ends          {describe(ends)}"
    yield ""
    yield f"{'type':8} {'tensors':>8} {'values':>16} {'bytes':>16}  served as"
    for use in inspection.types:
        yield f"{use.type:8} {use.num_tensors:8,} {use.num_values:16,} {use.num_bytes:16,}  {use.served}"
    if inspection.notes:
        yield ""
        yield from inspection.notes
    if has_metadata:
        yield ""
        for key, value in inspection.metadata.items():
            yield f"{key}  {shown(value)}"
    if inspection.problem:
        yield ""
        yield f"would be refused: {inspection.problem}"


def _encoder_line(encoder: EncoderInspection) -> str:
    if encoder.problem:
        return f"would be refused: {encoder.problem}"
    place = f", in {encoder.path}" if encoder.path else ""
    return (
        f"{encoder.num_layers} layers of {encoder.width}, patches of {encoder.patch_size}x{encoder.patch_size} pixels, "
        f"{encoder.num_values:,} values in {encoder.num_bytes:,} bytes{place}"
    )
