"""What users run stays short: files and lines of code of steps and of a streamed chat, and the pages on both."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.cpu.native_library import find_library
from tools.trace_step import Totals, TracedCall, count_changes, trace_step

ROOT = Path(__file__).resolve().parents[2]
DOCS, STEP, REQUEST = ROOT / "docs", "life-of-a-step.md", "life-of-a-request.md"
ROW = re.compile(r"\| (?:\w+ \| )?`(?P<path>[\w/]+\.py)` \| `(?P<function>[\w.]+)` \|")
# Files, lines of code, changes of file; with some slack, to be lowered when code goes. At the time of writing: 18,
# 2,570 and 38; 22, 2,860 and 48; 24, 3,060 and 63; 47, 5,720 and 179; for a chat 110 and 12,420. One loop, scheduler,
# runner and sampler run all of them, so a greedy step has the lines of an asynchronous one in its files. Images in
# prompts and chats have added 200 and 350 lines since, in files that texts go through as well.
LIMITS = {
    "greedy": (19, 2_640, 41),
    "sampled": (23, 2_940, 52),
    "asynchronous": (25, 3_150, 68),
    "prompt": (49, 6_000, 188),
}
CHAT_LIMITS = 113, 12_950
# Changes of file in the control plane, for any number of sequences.
MAX_CHANGES = 8


pytestmark = pytest.mark.skipif(isinstance(find_library(), str), reason="no native kernels were built")


@pytest.fixture(scope="module")
def step() -> list[TracedCall]:
    return trace_step(1)


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


def rows(page: str) -> list[tuple[str, str]]:
    """Return the path and the function of each row of a page."""
    return [(match["path"], match["function"]) for match in ROW.finditer((DOCS / page).read_text(encoding="utf-8"))]


def check_order(calls: list[TracedCall], page: str) -> None:
    """Check that the functions of a page were called, in its order."""
    remaining = iter([(call.path, call.function) for call in calls])
    for row in rows(page):
        assert row in remaining, f"{row} is not called, or not after the row before it"


def test_the_chat_calls_the_functions_of_the_page_in_this_order(chat: list[TracedCall]) -> None:
    assert len(rows(REQUEST)) > 35
    check_order(chat, REQUEST)


def test_the_step_calls_the_functions_of_the_page_in_this_order(step: list[TracedCall]) -> None:
    assert len(rows(STEP)) > 30
    check_order(step, STEP)


def test_the_page_has_all_files_of_the_step(step: list[TracedCall]) -> None:
    assert {call.path for call in step} == {path for path, _ in rows(STEP)}


def test_the_control_plane_changes_its_file_seldom(step: list[TracedCall]) -> None:
    assert count_changes(step) <= MAX_CHANGES
    assert count_changes(trace_step(4)) <= MAX_CHANGES, "a loop over sequences goes back and forth between files"
