"""Hold files and functions to the size budget.

The rule: a file has at most 400 lines, a function at most 60 lines of code (its signature and body without its
docstring, blank lines and comments). A little more is a warning, to be mended with the next change to that file;
beyond 420 and 65 the check fails.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tools", "tests", "benchmarks")


class Budget(NamedTuple):
    """Lines that are good, and lines that are too many."""

    good: int
    most: int


FILE_BUDGET = Budget(good=400, most=420)
FUNCTION_BUDGET = Budget(good=60, most=65)


class Excess(NamedTuple):
    """One thing that is longer than it should be."""

    where: str
    num_lines: int
    budget: Budget

    @property
    def is_failure(self) -> bool:
        """True when the check fails because of it."""
        return self.num_lines > self.budget.most


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Count a function's lines of code."""
    skipped: range = range(0)
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        skipped = range(first.lineno, (first.end_lineno or first.lineno) + 1)
    numbers = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    code = (lines[number - 1].strip() for number in numbers if number not in skipped)
    return sum(1 for line in code if line and not line.startswith("#"))


def excesses(path: Path, name: str) -> Iterator[Excess]:
    """Yield what is too long in one file, under the name that messages give it."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    if len(lines) > FILE_BUDGET.good:
        yield Excess(name, len(lines), FILE_BUDGET)
    for node in ast.walk(ast.parse(source, filename=name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = function_lines(node, lines)
            if count > FUNCTION_BUDGET.good:
                yield Excess(f"{name}:{node.lineno} {node.name}", count, FUNCTION_BUDGET)


def main() -> int:
    """Check every Python file of the project; 1 when something is far too long."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    found = [excess for path in paths for excess in excesses(path, str(path.relative_to(ROOT)))]
    for excess in found:
        word = "too long" if excess.is_failure else "long"
        print(f"{word}: {excess.where}: {excess.num_lines} lines (budget {excess.budget.good})")
    failures = sum(excess.is_failure for excess in found)
    print(f"sizes: {len(paths)} files, {len(found) - failures} warnings, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
