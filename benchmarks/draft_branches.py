"""Tokens per step with alternative drafts of a draft model: `python -m benchmarks.draft_branches`.

The target is the bundled model, and the draft model a copy of it whose weights have some noise, or more. Prompts are
the beginnings of stories, one sequence at a time, with 1 to 4 drafts of 4 tokens per step.

"Free" columns take all drafts, as if further rows of a step cost nothing, which is nearly so where a GPU reads weights
for few rows. "Measured" columns let the engine choose by the times of its steps on this machine; ratios of processor
time are of pairs of runs in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, facts
from quire import LLM, SamplingParams
from quire.models.checkpoints.checkpoint import locate
from quire.sequences.decoding.speculation import AdaptiveDrafter
from tests.conformance.test_draft_model import noisy_copy

PROMPTS = (
    "Once upon a time there was a little",
    "Tom and his sister went to the",
    "One day the old cat saw",
    "Mia had a red ball. She",
    "The bird was sad because",
    "In the morning Ben found a",
)


def open_llm(draft: Path, num_branches: int, *, is_free: bool) -> LLM:
    """Return an engine with a draft model."""
    llm = LLM(
        "bundled",
        num_threads=1,
        num_kv_blocks=400,
        speculative_method="draft",
        draft_model=str(draft),
        num_speculative_tokens=4,
        num_speculative_branches=num_branches,
    )
    if is_free:
        llm.engine.step_recorder.speculation = None
        drafter = llm.engine.scheduler.drafter
        assert isinstance(drafter, AdaptiveDrafter)
        drafter.step_costs = [1.0] * len(drafter.step_costs)
    return llm


def serve(llm: LLM, temperature: float, num_tokens: int, seed: int) -> tuple[float, float, float]:
    """Return the tokens of a step, the drafts of a step, and the processor time of a token in seconds."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=seed)
    before, steps, start = llm.stats.num_draft_tokens, llm.stats.num_steps, time.process_time()
    total = 0
    for prompt in PROMPTS:
        total += len(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
    elapsed, num_steps = time.process_time() - start, llm.stats.num_steps - steps
    return total / num_steps, (llm.stats.num_draft_tokens - before) / num_steps, elapsed / total


def measure(draft: Path, temperature: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of each number of branches."""
    rows = []
    with closing(open_llm(draft, 1, is_free=False)) as single:
        serve(single, temperature, options.tokens, 0)
        for num_branches in range(1, 5):
            with closing(open_llm(draft, num_branches, is_free=True)) as llm:
                per_step, drafts, _ = serve(llm, temperature, options.tokens, 0)
            ratios = []
            with closing(open_llm(draft, num_branches, is_free=False)) as llm:
                serve(llm, temperature, options.tokens, 0)
                for run in range(options.runs):
                    chosen, _, own_s = serve(llm, temperature, options.tokens, run)
                    ratios.append(serve(single, temperature, options.tokens, run)[2] / own_s)
            rows.append(
                {
                    "branches": num_branches,
                    "free_tokens_per_step": round(per_step, 3),
                    "free_drafts_per_step": round(drafts, 2),
                    "measured_tokens_per_step": round(chosen, 3),
                    "speed_ratio": round(statistics.median(ratios), 3),
                    "speed_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                }
            )
    return rows


def main() -> None:
    """Print a table for each temperature, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": facts()}
    for share, temperature in product((0.15, 0.4), (0.0, 1.0)):
        with tempfile.TemporaryDirectory() as folder:
            draft = noisy_copy(Path(locate("bundled")), Path(folder), share)
            rows = found[f"noise {share}, temperature {temperature}"] = measure(draft, temperature, options)
        print(f"noise {share}, temperature {temperature}")
        for row in rows:
            print("  ", row)
    (RESULTS / "draft_branches.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
