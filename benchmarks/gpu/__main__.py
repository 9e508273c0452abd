"""Check and measure the Triton backend on an NVIDIA GPU, in under nine minutes: `python -m benchmarks.gpu`.

It needs a copy of the tree, torch and Triton; the engine part needs all dependencies of Quire. First, ceilings are
measured (a copy, a dense matmul), then each kernel is checked against the reference implementation. A wrong result ends
the run, as its timings would be meaningless. Then attention, steps of two models with random weights, and an engine are
measured; the failure of one of these parts is a figure, and the others are still run. Figures are printed at once; the
table and the JSON follow at the end. Without a GPU it exits with status 2.

`--parts` runs some parts only, and `--despite-errors` measures the correct kernels although others are wrong.
`--predict` prints the predicted times, on any machine. `--rehearse` runs everything on tiny shapes on a CPU, in
Triton's interpreter (TRITON_INTERPRET=1): it shows that the benchmark runs, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.gpu.predictions import table
from benchmarks.gpu.shapes import LLAMA_8B, QWEN_06B, REHEARSED, STATED

NO_GPU = 2
# Seconds after which no further measurement is begun, so that the run ends within nine minutes.
LIMIT_S = 480.0
PARTS = ("correctness", "attention", "states", "models", "engine")


def main() -> int:
    """Run what the options say; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--predict", action="store_true", help="print predicted times, and measure nothing")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU in Triton's interpreter, on tiny shapes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is run, ceilings aside")
    parser.add_argument("--despite-errors", action="store_true", help="go on where a kernel is wrong")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds after which no figure is begun")
    parser.add_argument("--json", type=Path, default=machine.RESULTS / "gpu.json", help="file of the figures")
    options = parser.parse_args()
    if options.predict:
        print(table(STATED))
        return 0
    reason = missing(options.rehearse)
    if reason is not None:
        print(f"benchmarks.gpu: {reason}", file=sys.stderr)
        return NO_GPU
    return run(torch.device("cpu" if options.rehearse else "cuda"), options)


def missing(is_rehearsal: bool) -> str | None:
    """Return the reason why nothing can be run here, or None."""
    try:
        import triton
    except ImportError as error:
        return f"Triton cannot be imported ({error}); install triton, or Quire with its extra 'gpu'"
    is_interpreted = bool(triton.knobs.runtime.interpret)
    if is_rehearsal:
        return None if is_interpreted else "a rehearsal needs Triton's interpreter: set TRITON_INTERPRET=1"
    if not torch.cuda.is_available():
        return "there is no NVIDIA GPU that torch can use here; --predict and --rehearse need none"
    return "TRITON_INTERPRET is set: the kernels would run on the CPU; unset it" if is_interpreted else None


@torch.inference_mode()
def run(device: torch.device, options: argparse.Namespace) -> int:
    """Check, measure, and write the figures."""
    # Imported here: they need Triton.
    from benchmarks.gpu.adapters import measure_adapters
    from benchmarks.gpu.correctness import check_all
    from benchmarks.gpu.speed import measure_attention, measure_engine, measure_model
    from benchmarks.gpu.states import measure_states
    from benchmarks.gpu.timing import Bench, measure_ceilings
    from quire.ops.triton.triton_ops import TritonOps

    bench, parts, file = Bench(device, options.limit_s), options.parts, options.json
    ops = TritonOps(device)
    failed = list[str]()

    def attempt(name: str, measure: Callable[[], Any]) -> Any:
        """Return the result of a part; one that fails is a figure, and does not end the run."""
        try:
            return measure()
        except Exception as error:
            failed.append(name)
            return bench.add(name, failed=f"{type(error).__name__}: {error}"[:300])
        finally:
            gc.collect()  # decoders are in reference cycles, and large

    attempt("ceilings", partial(measure_ceilings, bench))
    is_right = "correctness" not in parts or bool(attempt("correctness", partial(check_all, bench, ops)))
    if is_right or options.despite_errors:
        if "attention" in parts:
            attempt("attention", partial(measure_attention, bench, ops))
        if "states" in parts:
            attempt("states", partial(measure_states, bench, ops))
        if "models" in parts:
            attempt("adapters", partial(measure_adapters, bench, ops))
            for shape in (REHEARSED,) if bench.is_rehearsal else (QWEN_06B, LLAMA_8B):
                attempt(shape.name, partial(measure_model, bench, ops, shape))
        if "engine" in parts:
            attempt("engine", partial(measure_engine, bench))
    report: dict[str, Any] = {
        "facts": machine.facts() | {"gpu": bench.rates.name, "is_rehearsal": bench.is_rehearsal},
        "parts": [*parts],
        "is_right": is_right,
        "figures": bench.figures,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(bench.figures)
    if failed:
        print(f"failed: {', '.join(failed)}")
    print(f"written to {file}" if is_right else f"a kernel is wrong; see {file}")
    return 0 if is_right and not failed else 1


def print_table(figures: dict[str, dict[str, Any]]) -> None:
    """Print the figures as a table of Markdown."""
    print("\n| figure | values |\n|---|---|")
    for name, values in figures.items():
        shown = ", ".join(f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
                          for key, value in values.items())  # fmt: skip
        print(f"| {name} | {shown} |")


if __name__ == "__main__":
    sys.exit(main())
