"""The cost of int8 activations by the size of their groups: `python -m benchmarks.activation_groups FILE`.

The inputs of every quantised linear layer of the exact model are rounded to int8 with a scale for a group of them, as
kernels do, and nothing else is rounded: what is lost is lost by the groups alone. Prints a table and saves it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import machine
from quire.bench.divergence import Divergence, DivergenceTally
from quire.bench.exact_ops import ExactOps
from quire.bench.quality import PIECE, ReadingEngine, exact_config
from quire.bench.quality_text import read_quality_text
from quire.config import EngineConfig
from quire.ops.interface import Activation, Linear, Ops
from quire.ops.quantized_weight import StoredWeight
from quire.platform.host_probe import probe

ROW = 0  # as a group: a scale for a row


class RoundedInputs(ExactOps):
    """Exact kernels whose stored weights get inputs rounded to int8.

    Args:
        room: see `ExactOps`.
        group: number of inputs that share a scale; `ROW` for all of a row.
    """

    def __init__(self, room: int, group: int) -> None:
        super().__init__(room)
        self._group = group

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
    ) -> Linear:
        """Keep a weight, and round the inputs of a stored one."""
        layer = super().pack_linear(weight, bias, min_bits, gate)
        return RoundedLinear(layer, self._group) if gate is None and isinstance(weight, StoredWeight) else layer


class RoundedLinear:
    """A linear layer whose inputs are rounded."""

    def __init__(self, layer: Linear, group: int) -> None:
        self._layer, self._group = layer, group

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Round, and multiply."""
        return self._layer(round_groups(x, self._group or x.shape[-1]), residual)


def round_groups(x: Tensor, group: int) -> Tensor:
    """Return rows [T, K] rounded to 255 levels of each group of inputs; the last may be shorter."""
    num_added = -x.shape[-1] % group
    parts = functional.pad(x, (0, num_added)).reshape(*x.shape[:-1], -1, group)
    scales = parts.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(scales > 0, (parts / scales).round() * scales, 0.0).flatten(-2)
    return rounded[..., : x.shape[-1]]


def measure(file: Path, groups: Sequence[int], max_tokens: int) -> dict[int, Divergence]:
    """Return what each size of groups loses on the text of `quire bench quality`."""
    config = exact_config(EngineConfig.from_options(model=str(file)))
    room = probe("cpu").available_bytes // 4
    with_text = ReadingEngine(EngineConfig.from_options(model=str(file)))
    sequences = read_quality_text(with_text.tokenizer, None, with_text.max_length, max_tokens)
    with_text.close()
    exact = ReadingEngine(config, lambda _: ExactOps(room))
    hidden = [exact.hidden(ids)[:-1] for ids in sequences]
    size, found = max(1, PIECE // exact.vocab_size), {}
    for group in groups:
        kernels = RoundedInputs(room, group)
        engine, tally = ReadingEngine(config, partial(_instead, kernels)), DivergenceTally()
        for ids, theirs in zip(sequences, hidden, strict=True):
            ours, targets = engine.hidden(ids)[:-1], torch.tensor(ids[1:])
            for part in (slice(first, first + size) for first in range(0, len(targets), size)):
                tally.add(engine.logits(ours[part]), exact.logits(theirs[part]), targets[part])
        engine.close()
        found[group] = tally.result()
        print(f"| {group or 'a row'} | {found[group].kl_mean:.5f} | {found[group].same_best:.1%} |", flush=True)
    exact.close()
    return found


def _instead(kernels: Ops, _: Ops) -> Ops:
    return kernels


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a checkpoint with quantised weights")
    parser.add_argument("--groups", type=int, nargs="+", default=(16, 32, 64, 128, 256, ROW), help="0 for a row")
    parser.add_argument("--tokens", type=int, default=0, help="most tokens of the text; all by default")
    parser.add_argument("--name", default="activation_groups", help="the name of the file under results/")
    args = parser.parse_args()
    print("| inputs of a scale | KL mean | same best token |\n|---|---:|---:|")
    found = measure(args.file, args.groups, args.tokens)
    rows = {str(group): asdict(divergence) for group, divergence in found.items()}
    print(machine.save(args.name, {"settings": {"model": args.file.name}, "rows": rows}))


if __name__ == "__main__":
    main()
