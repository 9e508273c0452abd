"""Trace one decode step of the engine: `python -m tools.trace_step`.

Four greedy requests decode with the bundled model on the CPU; one step in which a sequence gets a new block is traced.
Printed are the files of the step with their lines and functions, in the order of their first call; then the totals, and
the number of changes of file between consecutive calls in the control plane (scheduler and memory, from
`Scheduler.plan` on, without what the outputs ask of sequences afterwards).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import quire
from quire import LLM, SamplingParams

PACKAGE = Path(quire.__file__).resolve().parent
CONTROL_PLANE = ("decoding", "memory", "scheduling", "sequences")
NUM_REQUESTS = 4
BLOCK_SIZE = 16


class Call(NamedTuple):
    """A call of a function of the package.

    Args:
        path: path of its file below the package, with slashes.
        function: qualified name of the function.
    """

    path: str
    function: str


def trace_step() -> list[Call]:
    """Return the calls of a decode step, in order; comprehensions and generators belong to the function around them."""
    calls: list[Call] = []
    root = f"{PACKAGE}/"

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            calls.append(Call(code.co_filename[len(root) :], code.co_qualname.split(".<locals>")[0]))

    with LLM("bundled", block_size=BLOCK_SIZE, device="cpu", enable_prefix_caching=True) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=3 * BLOCK_SIZE, ignore_eos=True)
        for number in range(NUM_REQUESTS):
            # Different lengths: some sequence gets a block in every few steps.
            engine.add_request(str(number), list(range(10, 20 + 4 * number)), params)
        for _ in range(BLOCK_SIZE):
            engine.step()  # the first steps compute the prompts and record the kernels
        sequences = list(engine.scheduler.sequences.values())
        while all(sequence.num_computed % BLOCK_SIZE for sequence in sequences):
            engine.step()
        previous = sys.getprofile()
        sys.setprofile(on_event)
        try:
            engine.step()
        finally:
            sys.setprofile(previous)
    return calls


def count_lines(path: str) -> int:
    """Return the number of lines of a file of the package."""
    return len((PACKAGE / path).read_text(encoding="utf-8").splitlines())


def control_plane(calls: Sequence[Call]) -> list[Call]:
    """Return the calls of the scheduler and of all that it calls in the control plane."""
    kept = [call for call in calls if call.path.split("/")[0] in CONTROL_PLANE]
    last = max(idx for idx, call in enumerate(kept) if call.path.startswith(("scheduling/", "memory/")))
    return kept[: last + 1]


def main() -> int:
    """Print the walk and its counts."""
    calls = trace_step()
    functions: dict[str, dict[str, None]] = {}
    for call in calls:
        functions.setdefault(call.path, {})[call.function] = None
    for path, names in functions.items():
        print(f"{count_lines(path):5} {path}: {', '.join(names)}")
    control = control_plane(calls)
    changes = sum(first.path != second.path for first, second in pairwise(control))
    print(f"step: {len(functions)} files, {sum(map(count_lines, functions))} lines, {len(calls)} calls")
    num_files = len({call.path for call in control})
    print(f"control plane: {num_files} files, {len(control)} calls, {changes} changes of file")
    return 0


if __name__ == "__main__":
    sys.exit(main())
