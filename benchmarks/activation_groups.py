"""The cost of int8 activations by the size of their groups: `python -m benchmarks.activation_groups FILE`.

The inputs of every quantised linear layer of the exact model are rounded to int8 with a scale for a group of them, as
kernels do, and nothing else is rounded: what is lost is lost by the groups alone. Prints the table of
`benchmarks.quality`, and saves it.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from torch import Tensor

from benchmarks.quality import ExactText, report
from quire.config import EngineConfig
from quire.measurement.bench.exact_ops import ExactLinear, ExactOps
from quire.measurement.bench.quality import exact_config
from quire.ops.interface.ops import Activation, Linear, Ops
from quire.ops.interface.quantized_weight import StoredWeight
from quire.ops.pytorch.torch_quantised import rounded_rows
from quire.platform.host_probe import probe

ROW = 0  # as a group: a scale for a row


class RoundedInputs(ExactOps):
    """Exact kernels whose stored weights get inputs rounded to int8.

    Args:
        group: number of inputs that share a scale; `ROW` for all of a row.
    """

    def __init__(self, group: int) -> None:
        super().__init__(probe("cpu").available_bytes // 2)
        self._group = group

    @classmethod
    def instead_of(cls, group: int, _: Ops) -> RoundedInputs:
        """Return kernels in place of others."""
        return cls(group)

    def pack_linear(
        self,
        weight: Tensor | StoredWeight,
        bias: Tensor | None = None,
        min_bits: int = 4,
        gate: Activation | None = None,
        num_slices: int = 1,  # noqa: ARG002 (no order of sums is promised)
        max_group: int = 32,  # noqa: ARG002 (nothing is rounded)
    ) -> Linear:
        """Keep a weight, and round the inputs of a stored one."""
        layer = super().pack_linear(weight, bias, min_bits, gate)
        return RoundedLinear(layer, self._group) if isinstance(layer, ExactLinear) else layer


class RoundedLinear:
    """An exact linear layer whose inputs are rounded."""

    def __init__(self, layer: ExactLinear, group: int) -> None:
        self._layer, self._group = layer, group
        self.rows = layer.rows

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Round, and multiply."""
        width = x.shape[-1]
        return self._layer(rounded_rows(x, self._group or width)[:, :width], residual)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a checkpoint with quantised weights")
    parser.add_argument("--groups", type=int, nargs="+", default=(16, 32, 64, 128, 256, ROW), help="0 for a row")
    parser.add_argument("--text", type=Path, help="text to read; the bundled one by default")
    parser.add_argument("--tokens", type=int, default=0, help="most tokens of the text; all by default")
    parser.add_argument("--greedy", type=int, nargs=2, default=(20, 32), metavar=("PROMPTS", "TOKENS"))
    parser.add_argument("--name", default="activation_groups", help="the name of the file under results/")
    args = parser.parse_args()
    num_prompts, num_tokens = args.greedy
    exact = ExactText(args.file, num_prompts, num_tokens, args.tokens, args.text)
    config = exact_config(EngineConfig.from_options(model=str(args.file)))
    names = {group: f"{group}" if group else "a row" for group in args.groups}
    rows = [exact.of_form(name, config, partial(RoundedInputs.instead_of, group)) for group, name in names.items()]
    report(args.name, rows, {"model": args.file.name})


if __name__ == "__main__":
    main()
