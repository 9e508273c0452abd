"""No two classes of the source, the benchmarks and the tools have one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("src/quire", "benchmarks", "tools")


def classes() -> dict[str, list[str]]:
    """Return the files that define each module-level class, by its name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    return found


def test_no_two_classes_have_one_name() -> None:
    found = classes()
    assert len(found) > 500
    assert not {name: files for name, files in found.items() if len(files) > 1}
