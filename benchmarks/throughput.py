"""Throughput beside other engines, in the same minutes: `python -m benchmarks.throughput`.

A machine's memory bandwidth moves while one looks at it, so the contenders take turns run by run, each run stands
between two bandwidth probes, and what counts is the ratio of medians. A peer with an environment of its own runs under
that environment's interpreter; one that is not there, or does not start, is left out, and that is said.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from benchmarks import conversions, gguf_shapes, machine, make_gguf, make_model
from benchmarks.contenders import APART, CONTENDERS
from benchmarks.engines import ANSWER
from benchmarks.marks import bandwidth_share, judge, medians
from benchmarks.serving import MAX_MODEL_LEN, Figures
from benchmarks.shapes import CheckpointShape
from quire.measurement.bench.workloads import NAMES, workload

ROOT = Path(__file__).resolve().parent.parent
# An engine may be at work after its answer, Quire with pages of its cache: the next one is not to be held up by that.
SETTLE_S = 3.0


class Worker:
    """One engine in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ready = self._answer()

    def run(self, name: str, run: int) -> Figures:
        """Serve one run of a workload and return its figures."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name} {run}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Figures:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                answer: Figures = json.loads(line[len(ANSWER) :])
                return answer
        raise RuntimeError(f"the engine's process ended with status {self._process.wait()}")


@contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[Worker]:
    """Start a worker's process, with some variables of its own; it is ended on leaving."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | env, cwd=ROOT)
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.communicate()


class EngineComparison:
    """The contenders' processes for some workloads, and who has none.

    Args:
        options: options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.left_out: dict[str, str] = {}
        self.versions: dict[str, str | None] = {}
        self._options = options
        self._pythons = {engine: getattr(options, f"{engine}_python") for engine in APART}

    def worker(self, who: str, name: str) -> AbstractContextManager[Worker]:
        """Start a contender's process for a workload; it is ended on leaving.

        Raises:
            RuntimeError, CalledProcessError, OSError: it does not start, or its checkpoint cannot be converted.
        """
        options, contender = self._options, CONTENDERS[who]
        python = sys.executable
        env = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env["PYTHONPATH"] = str(ROOT / "src")  # the workloads are Quire's
        if contender.engine in APART:
            if self._pythons[contender.engine] is None:
                raise RuntimeError(f"--{contender.engine}-python says where {APART[contender.engine]} is installed")
            python = str(self._pythons[contender.engine])
        if contender.engine == "vllm" and options.vllm_preload:
            env["LD_PRELOAD"] = options.vllm_preload
        model = options.model
        if contender.form is not None:
            model = conversions.ensure(contender.form, model, options.converted, python)
        requests = workload(name, 0).requests
        max_model_len = max(MAX_MODEL_LEN, *(len(request.prompt) + request.num_new for request in requests))
        command = [python, "-m", "benchmarks.engines", who, str(model)]
        command += ["--threads", str(options.threads), "--sequences", str(len(requests))]
        command += ["--max-model-len", str(max_model_len)]
        command += ["--no-caching"] if name == "W5-off" else []
        return running(command, env)

    def measure(self, names: list[str], contenders: list[str]) -> list[Figures]:
        """Run some workloads on all contenders, in turns, and return one row of figures for each run.

        Args:
            names: workloads with the same number of requests.
            contenders: names in `CONTENDERS`; one that fails is left out from then on.
        """
        pairs = [
            (name, who)
            for name in names
            for who in contenders
            # It has no prefix cache: with the cache cold, warm or off, it does the same.
            if who != "generate" or name not in ("W5-cold", "W5-warm")
        ]
        rows: list[Figures] = []
        shape = shape_of(self._options.model)
        probe = machine.MachineProbe(self._options.threads)
        with ExitStack() as stack:
            workers: dict[tuple[str, bool], Worker] = {}
            for name, who in pairs:
                key = (who, name != "W5-off")
                if key in workers or who in self.left_out:
                    continue
                with self._leaving_out(who):
                    workers[key] = stack.enter_context(self.worker(who, name))
                    self.versions[who] = workers[key].ready["version"]
            before = probe.read_gb_s()
            for run, (name, who) in itertools.product(range(self._options.runs), pairs):
                if who in self.left_out:
                    continue
                with self._leaving_out(who):
                    # A warm run must not find what a cold run of the same engine left, so they never share tokens.
                    figures = workers[who, name != "W5-off"].run(name, 2 * run + (name == "W5-warm"))
                    time.sleep(SETTLE_S)
                    after = probe.read_gb_s()
                    row = {"contender": who, "workload": name, "run": run, **figures, "probe_gb_s": [before, after]}
                    row["bandwidth_share"] = None if shape is None else bandwidth_share(shape, row)
                    print(describe(row), flush=True)
                    rows.append(row)
                    before = after
        return rows

    @contextmanager
    def _leaving_out(self, who: str) -> Iterator[None]:
        """Leave a contender out from now on where what is done with it fails."""
        try:
            yield
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            self.left_out[who] = str(error)
            print(f"left out: {who}: {error}", flush=True)


def shape_of(model: Path) -> CheckpointShape | None:
    """Return the shape of a checkpoint; None for one that has GGUF files only."""
    return CheckpointShape.read(model) if (model / "model.safetensors").exists() else None


def describe(row: Figures) -> str:
    """Return one run in one line."""
    gb_s = " to ".join(f"{value:.0f}" for value in row["probe_gb_s"] if value is not None)
    rate = row["decode_tokens_per_s"]
    return (
        f"{row['workload']:8} {row['contender']:14} run {row['run']}: {row['wall_s']:7.2f} s, "
        f"all started after {row['all_started_s']:6.2f} s"
        + (f", then {rate:6.1f} tokens/s" if rate else "")
        + f", peak {row['peak_memory_bytes'] / 1e9:.2f} GB"
        + (f" ({gb_s} GB/s)" if gb_s else "")
    )


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", default="W1,W2,W3,W5", help="of W1 to W6 (W5: cold, warm, off; W6: 4k, 16k)")
    parser.add_argument("--contenders", default="quire,generate,cb", help=f"of {','.join(CONTENDERS)}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", type=Path, default=None, help="a checkpoint folder; default: a random one")
    parser.add_argument(
        "--shape",
        choices=(*make_model.SHAPES, *gguf_shapes.SHAPES),
        default="qwen3-0.6b",
        help="of the random one",
    )
    for engine, package in APART.items():
        parser.add_argument(f"--{engine}-python", type=Path, default=None, help=f"interpreter that has {package}")
    parser.add_argument("--vllm-preload", default="", help="libraries to preload for vLLM, with colons between")
    parser.add_argument("--converted", type=Path, default=machine.BUILD, help="where peers' checkpoints are kept")
    parser.add_argument("--name", default="throughput", help="the name of the file under results/")
    options = parser.parse_args()
    if options.model is None:
        ensure = make_gguf.ensure_folder if options.shape in gguf_shapes.SHAPES else make_model.ensure
        options.model = ensure(options.shape)
    contenders = options.contenders.split(",")
    unknown = set(contenders) - set(CONTENDERS)
    if unknown:
        parser.error(f"unknown contenders: {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    rows: list[Figures] = []
    bench = EngineComparison(options)
    for chosen in options.workloads.split(","):
        names = [name for name in NAMES if name.partition("-")[0] == chosen or name == chosen]
        if not names:
            parser.error(f"unknown workload {chosen}; there are {', '.join(NAMES)}")
        rows += bench.measure(names, contenders)
    table = medians(rows)
    verdicts = judge(table, shape_of(options.model))
    for verdict in verdicts:
        print(
            f"{verdict.what}: {verdict.value:.4g} (mark: {verdict.mark:.4g}, {'met' if verdict.is_met else 'missed'})"
        )
    settings = {"threads": options.threads, "runs": options.runs, "dtype": "bfloat16", "model": options.model.name}
    # Where they lie on this machine says nothing on another.
    preloaded = [Path(name).name for name in options.vllm_preload.split(":") if name]
    settings |= {"versions": bench.versions, "left_out": bench.left_out, "vllm_preload": preloaded}
    marks = [verdict._asdict() for verdict in verdicts]
    print(machine.save(options.name, {"settings": settings, "medians": table, "marks": marks, "runs": rows}))


if __name__ == "__main__":
    main()
