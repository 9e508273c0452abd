"""The time in which a GPU would wait between two steps: `python -m benchmarks.step_gaps`; needs no GPU.

From the moment that the host has read a step until it begins to launch the next one, a device has nothing to do. The
whole engine of the bundled model is run step by step and with asynchronous scheduling, in turns, for requests whose
next step cannot be planned before the present one is read: with drafts, and with a grammar. Each request has an output
with its text for each step, as a stream has. How long the steps themselves take is of no account; planning is, and
outputs are where they are made in between.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from statistics import median
from typing import Any, Final
from unittest import mock

from quire import LLM, SamplingParams, StructuredOutputs
from quire.execution.runners.async_executor import AsyncExecutor, LaunchedStep
from quire.execution.runners.runner import InProcessExecutor

# Options of the engine and of the requests.
KINDS: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "n-gram drafts": ({"speculative_method": "ngram", "num_speculative_tokens": 4}, {}),
    "a grammar": ({}, {"structured_outputs": StructuredOutputs(regex="[a-z ,.]{300,400}")}),
}
STORY: Final = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "


@contextmanager
def recorded_gaps() -> Iterator[list[float]]:
    """Return a context in which gaps between steps are recorded, in seconds."""
    gaps: list[float] = []
    ends: list[float] = []
    execute, launch, result = InProcessExecutor.execute, AsyncExecutor.launch, LaunchedStep.result

    def begin() -> None:
        if ends:
            gaps.append(time.perf_counter() - ends.pop())

    def execute_seen(self: InProcessExecutor, plan: Any) -> Any:
        if type(self) is AsyncExecutor:  # from within `launch`
            return execute(self, plan)
        begin()
        found = execute(self, plan)
        ends.append(time.perf_counter())
        return found

    def launch_seen(self: AsyncExecutor, plan: Any) -> Any:
        begin()
        return launch(self, plan)

    def result_seen(self: LaunchedStep) -> Any:
        found = result(self)
        ends.append(time.perf_counter())
        return found

    with (
        mock.patch.object(InProcessExecutor, "execute", execute_seen),
        mock.patch.object(AsyncExecutor, "launch", launch_seen),
        mock.patch.object(LaunchedStep, "result", result_seen),
    ):
        yield gaps


def measure(num_sequences: int, kind: str, *, is_async: bool) -> float:
    """Return the median gap of steps with all sequences, in milliseconds."""
    options, asked = KINDS[kind]
    usual: dict[str, Any] = {"max_num_seqs": num_sequences, "num_threads": 1, "max_model_len": 256}
    with closing(LLM("bundled", **usual, **options, async_scheduling=is_async)) as llm:
        for idx in range(num_sequences):
            params = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=not asked, **asked)
            llm.engine.add_request(str(idx), STORY[idx % 16 :], params)
        with recorded_gaps() as gaps:
            while llm.engine.has_unfinished and len(llm.engine.outputs.states) == num_sequences:
                llm.engine.step()
    return median(gaps[len(gaps) // 4 :]) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 128])
    args = parser.parse_args()
    print("| requests | sequences | gap step by step, ms | asynchronous, ms |")
    print("|---|---|---|---|")
    for kind in KINDS:
        for num_sequences in args.sequences:
            runs = [
                [measure(num_sequences, kind, is_async=is_async) for is_async in (False, True)]
                for _ in range(args.runs)
            ]
            before, after = (median(column) for column in zip(*runs, strict=True))
            print(f"| {kind} | {num_sequences} | {before:.2f} | {after:.2f} |", flush=True)


if __name__ == "__main__":
    main()
