"""What users run stays short: files and lines of code of steps and of a streamed chat, and the page on the chat."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.cpu.native_library import find_library
from tools.trace_step import Totals, TracedCall, trace_step

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"\| \w+ \| `(?P<path>[\w/]+\.py)` \| `(?P<function>[\w.]+)` \|")
# Files, lines of code, changes of file; with some slack, to be lowered when code goes. At the time of writing: 18,
# 2,177 and 42; 26, 3,006 and 62; 27, 3,205 and 103; 56, 6,146 and 204; for a chat 124 and 12,954.
LIMITS = {
    "greedy": (19, 2_300, 45),
    "sampled": (28, 3_150, 66),
    "asynchronous": (29, 3_350, 110),
    "prompt": (59, 6_400, 215),
}
CHAT_LIMITS = 131, 13_600


@pytest.fixture(scope="module", autouse=True)
def _native() -> None:
    if isinstance(find_library(), str):
        pytest.skip("the limits are those of native kernels")


@pytest.fixture(scope="module")
def chat() -> list[TracedCall]:
    """Return the calls of a chat, traced in a process of its own, which a signal ends."""
    command = [sys.executable, "-m", "tools.trace_step", "chat", "calls"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
    rows = [line.split(" ") for line in done.stdout.splitlines() if line.startswith("call ")]
    return [TracedCall(path, function, False, int(thread)) for _, path, function, thread in rows]


@pytest.mark.parametrize("kind", LIMITS)
def test_a_step_goes_through_few_files(kind: str) -> None:
    found, limits = Totals.of(trace_step(1, kind)), LIMITS[kind]
    assert (found.files <= limits[0], found.code <= limits[1], found.changes <= limits[2]) == (True, True, True), found
    assert found.files > 0.8 * limits[0], "the limit has too much slack"
    assert found.code > 0.8 * limits[1], "the limit has too much slack"


def test_a_streamed_chat_goes_through_few_files(chat: list[TracedCall]) -> None:
    found = Totals.of(chat)
    assert (found.files <= CHAT_LIMITS[0], found.code <= CHAT_LIMITS[1]) == (True, True), found
    assert found.files > 0.8 * CHAT_LIMITS[0], "the limit has too much slack"


def test_the_chat_calls_the_functions_of_the_page_in_this_order(chat: list[TracedCall]) -> None:
    page = (ROOT / "docs" / "life-of-a-request.md").read_text(encoding="utf-8")
    rows = [(match["path"], match["function"]) for match in ROW.finditer(page)]
    assert len(rows) > 35
    remaining = iter([(call.path, call.function) for call in chat])
    for row in rows:
        assert row in remaining, f"{row} is not called, or not after the row before it"
