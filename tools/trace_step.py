"""Trace one decode step of the engine: `python -m tools.trace_step`.

Greedy requests decode with the bundled model on the CPU; a step in which a sequence gets a new block is traced. The
output has the files of the step with their lines and functions, in the order of their first call; then the totals, and
the changes of file between consecutive calls within `Scheduler.plan` and `Scheduler.update_from_results`, for one
sequence and for four (a loop over sequences repeats the changes).
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
from quire.scheduling.scheduler import Scheduler

PACKAGE = Path(quire.__file__).resolve().parent
CONTROL_PLANE = ("decoding", "memory", "scheduling", "sequences")
BLOCK_SIZE = 16


class TracedCall(NamedTuple):
    """A call of a function of the package.

    Args:
        path: path of its file relative to the package, with slashes.
        function: qualified name of the function.
        is_control: True for the control plane within `Scheduler.plan` or `Scheduler.update_from_results`.
    """

    path: str
    function: str
    is_control: bool


def trace_step(num_requests: int) -> list[TracedCall]:
    """Return the calls of a decode step in order; a comprehension or generator counts as its enclosing function."""
    calls: list[TracedCall] = []
    root = f"{PACKAGE}/"
    control_depth = 0

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal control_depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(root):
            return
        is_entry = code in (Scheduler.plan.__code__, Scheduler.update_from_results.__code__)
        if event == "return":
            control_depth -= is_entry
            return
        control_depth += is_entry
        function = code.co_qualname.split(".<locals>")[0]
        path = code.co_filename[len(root) :]
        calls.append(TracedCall(path, function, control_depth > 0 and path.split("/")[0] in CONTROL_PLANE))

    with LLM("bundled", block_size=BLOCK_SIZE, device="cpu", enable_prefix_caching=True) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=3 * BLOCK_SIZE, ignore_eos=True)
        # Prompts of different lengths, so that some sequence gets a new block every few steps.
        prompts = [list(range(10, 20 + 4 * number)) for number in range(num_requests)]
        # Texts of tokens are kept when they are first made: the traced step meets none for the first time.
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False, cache_salt="first")
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, params)
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


def count_changes(calls: Sequence[TracedCall]) -> int:
    """Return the number of changes of file between consecutive calls of the control plane."""
    control = [call.path for call in calls if call.is_control]
    return sum(first != second for first, second in pairwise(control))


def main() -> int:
    """Print the walk and its counts."""
    calls = trace_step(1)
    functions: dict[str, dict[str, None]] = {}
    for call in calls:
        functions.setdefault(call.path, {})[call.function] = None
    for path, names in functions.items():
        print(f"{count_lines(path):5} {path}: {', '.join(names)}")
    print(f"step: {len(functions)} files, {sum(map(count_lines, functions))} lines, {len(calls)} calls")
    control = [call for call in calls if call.is_control]
    print(f"control plane: {len({call.path for call in control})} files, {len(control)} calls")
    print(f"changes of file in it: {count_changes(calls)}, with four sequences {count_changes(trace_step(4))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
