"""The page on a decode step names the functions that a real step calls, in their order, and all of its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.ops.cpu.native_library import find_library
from tools.trace_step import TracedCall, count_changes, trace_step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "life-of-a-step.md"
ROW = re.compile(r"\| `(?P<path>[\w/]+\.py)` \| `(?P<function>[\w.]+)` \|")
MAX_CHANGES = 8


@pytest.fixture(scope="module")
def calls() -> list[TracedCall]:
    if isinstance(find_library(), str):
        pytest.skip("the page is about a step with native kernels")
    return trace_step(1)


def rows() -> list[tuple[str, str]]:
    """Return the path and the function of each row of the page."""
    return [(match["path"], match["function"]) for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))]


def test_the_step_calls_the_functions_of_the_page_in_this_order(calls: list[TracedCall]) -> None:
    remaining = iter([(call.path, call.function) for call in calls])
    assert len(rows()) > 30
    for row in rows():
        assert row in remaining, f"{row} is not called, or not after the row before it"


def test_the_page_has_all_files_of_the_step(calls: list[TracedCall]) -> None:
    assert {call.path for call in calls} == {path for path, _ in rows()}


def test_the_control_plane_changes_its_file_seldom(calls: list[TracedCall]) -> None:
    assert count_changes(calls) <= MAX_CHANGES
    assert count_changes(trace_step(4)) <= MAX_CHANGES, "a loop over sequences goes back and forth between files"
