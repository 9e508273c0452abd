"""Check that lines of Markdown pages have at most 120 columns.

Tables and fenced code are exempt, since they cannot be wrapped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MAX_COLUMNS = 120
FENCE = "```"


class LongLine(NamedTuple):
    """A line over the limit."""

    number: int
    num_columns: int


def long_lines(text: str) -> Iterator[LongLine]:
    """Yield the lines of a page over the limit, outside tables and fenced code."""
    in_fence = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith(FENCE):
            in_fence = not in_fence
        elif len(line) > MAX_COLUMNS and not in_fence and not line.lstrip().startswith("|"):
            yield LongLine(number, len(line))


def pages(root: Path) -> list[Path]:
    """Return the Markdown pages of a repository: at its root, and in `docs` with all subfolders."""
    return sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")])


def main(root: Path = ROOT) -> int:
    """Check every page; return 1 if a line is too long."""
    checked = pages(root)
    num_failures = 0
    for page in checked:
        for line in long_lines(page.read_text(encoding="utf-8")):
            num_failures += 1
            where = f"{page.relative_to(root)}:{line.number}"
            print(f"too wide: {where}: {line.num_columns} columns (limit {MAX_COLUMNS})")
    print(f"docs: {len(checked)} pages, {num_failures} failures")
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
