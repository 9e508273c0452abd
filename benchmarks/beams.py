"""Beam search beside `generate(num_beams=...)` of transformers, and beside samples: `python -m benchmarks.beams`.

Three jobs over the same prompts, in turns: Quire's beam search; transformers' beam search; and Quire decoding as many
sequences greedily, which share the prompts as the beams do, but never part. Both engines run in processes of their own,
each with the model loaded once; outputs go on to their full length.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, make_model
from benchmarks.engines import ANSWER
from benchmarks.throughput import ROOT, running

VOCAB = 150_000
# The marks: times transformers' throughput, and times the time of greedy sequences.
AT_LEAST, AT_MOST = 3.0, 1.5


class BeamWorkload(NamedTuple):
    """The prompts and the width of a beam search.

    Args:
        num_prompts: prompts that arrive at once.
        num_prompt: tokens of each, all different.
        num_new: tokens of each output.
        width: beams of each prompt.
    """

    num_prompts: int
    num_prompt: int
    num_new: int
    width: int

    def prompts(self, run: int) -> list[list[int]]:
        """Return the token ids of one run."""
        rng = random.Random(f"{self} {run}")
        return [[rng.randrange(VOCAB) for _ in range(self.num_prompt)] for _ in range(self.num_prompts)]


def quire_jobs(model: Path, threads: int, work: BeamWorkload) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Load the model in Quire and return its jobs, by name."""
    from quire import LLM, SamplingParams

    num_seqs = work.num_prompts * work.width
    num_blocks = num_seqs * (-(-(work.num_prompt + work.num_new) // 16) + 2)
    llm = LLM(
        str(model),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        num_threads=threads,
        max_model_len=work.num_prompt + work.num_new,
        max_num_seqs=num_seqs,
        num_kv_blocks=num_blocks,
    )
    plain: dict[str, Any] = {"max_tokens": work.num_new, "ignore_eos": True, "detokenize": False}
    kinds = {
        "beams": SamplingParams(beam_width=work.width, n=work.width, **plain),
        "greedy": SamplingParams(temperature=0.0, n=work.width, **plain),
    }

    def job(kind: str, run: int) -> dict[str, Any]:
        llm.reset_prefix_cache()
        before, prompts = llm.stats, work.prompts(run)
        started = time.perf_counter()
        outputs = llm.generate(prompts, kinds[kind], use_tqdm=False)
        wall_s = time.perf_counter() - started
        assert all(len(one.token_ids) == work.num_new for output in outputs for one in output.outputs)
        assert llm.stats.num_preemptions == before.num_preemptions
        return {"wall_s": wall_s, "num_copies": llm.stats.num_copies - before.num_copies}

    return {kind: lambda run, kind=kind: job(kind, run) for kind in kinds}  # type: ignore[misc]


def transformers_jobs(model: Path, threads: int, work: BeamWorkload) -> dict[str, Callable[[int], dict[str, Any]]]:
    """Load the model in transformers and return its job."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    config = GenerationConfig(
        num_beams=work.width,
        num_return_sequences=work.width,
        max_new_tokens=work.num_new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    loaded.generation_config = config

    def job(run: int) -> dict[str, Any]:
        ids = torch.tensor(work.prompts(run))
        started = time.perf_counter()
        with torch.inference_mode():
            output = loaded.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        wall_s = time.perf_counter() - started
        assert output.shape == (work.num_prompts * work.width, work.num_prompt + work.num_new)
        return {"wall_s": wall_s}

    return {"transformers": job}


ENGINES = {"quire": quire_jobs, "transformers": transformers_jobs}
ENGINE_OF = {"beams": "quire", "greedy": "quire", "transformers": "transformers"}


def serve(options: argparse.Namespace, work: BeamWorkload) -> None:
    """Run the jobs whose names come in on standard input."""
    jobs = ENGINES[options.worker](options.model, options.threads, work)
    print(f"{ANSWER}{{}}", flush=True)
    for line in sys.stdin:
        name, run = line.split()
        print(f"{ANSWER}{json.dumps(jobs[name](int(run)))}", flush=True)


def measure(options: argparse.Namespace, work: BeamWorkload) -> list[dict[str, Any]]:
    """Run all jobs in turns; return a row of figures for each run."""
    probe = machine.MachineProbe(options.threads)
    env = {"OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "src")}
    rows = []
    with ExitStack() as stack:
        workers = {}
        for engine in {ENGINE_OF[name] for name in options.jobs}:
            command = [sys.executable, "-m", "benchmarks.beams", "--worker", engine, "--model", str(options.model)]
            command += ["--threads", str(options.threads)]
            command += [f"--{name.replace('_', '-')}={value}" for name, value in work._asdict().items()]
            workers[engine] = stack.enter_context(running(command, env))
        for run in range(options.runs):
            for name in options.jobs:
                before = probe.read_gb_s()
                figures = workers[ENGINE_OF[name]].run(name, run)
                rows.append({"job": name, "run": run, **figures, "read_gb_s": [before, probe.read_gb_s()]})
                print(f"run {run}: {name:12} {figures['wall_s']:8.2f} s", flush=True)
    return rows


def judge(rows: list[dict[str, Any]], work: BeamWorkload) -> dict[str, Any]:
    """Return the medians, and how they stand against what was asked for."""
    names = {row["job"] for row in rows}
    wall_s = {name: statistics.median(row["wall_s"] for row in rows if row["job"] == name) for name in names}
    num_tokens = work.num_prompts * work.width * work.num_new
    verdict: dict[str, Any] = {"wall_s": wall_s, "tokens_per_s": {name: num_tokens / s for name, s in wall_s.items()}}
    if "transformers" in wall_s:
        verdict["times_transformers"] = wall_s["transformers"] / wall_s["beams"]
    if "greedy" in wall_s:
        verdict["times_greedy"] = wall_s["beams"] / wall_s["greedy"]
    return verdict


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=make_model.FOLDER / "qwen3-0.6b-random")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", choices=ENGINE_OF, default=list(ENGINE_OF))
    for name, value in BeamWorkload(8, 512, 64, 4)._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--worker", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = BeamWorkload(*(getattr(options, name) for name in BeamWorkload._fields))
    if options.worker is not None:
        serve(options, work)
        return
    rows = measure(options, work)
    verdict = judge(rows, work)
    if "times_transformers" in verdict:
        print(f"{verdict['times_transformers']:.2f} times transformers' throughput (asked for: {AT_LEAST})")
    if "times_greedy" in verdict:
        print(f"{verdict['times_greedy']:.2f} times the time of greedy sequences (asked for: {AT_MOST} at most)")
    if set(options.jobs) == set(ENGINE_OF):
        print(machine.save("beams", {"threads": options.threads, "work": work._asdict(), **verdict, "runs": rows}))


if __name__ == "__main__":
    main()
