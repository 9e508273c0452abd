"""The retired names of the glossary are no identifiers of the source any more."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| `(\w+)` \| `\w+` \|$", re.MULTILINE)
FOLDERS = ("src", "tests", "benchmarks", "tools")


def retired() -> set[str]:
    """Return the names of the glossary's second table."""
    return set(ROW.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")))


def identifiers(path: Path, names: set[str]) -> set[str]:
    """Return which of some names a Python file or a C++ source uses."""
    source = path.read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", source)) & names
    if path.suffix != ".py" or not words:
        return words
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return words & {token.string for token in tokens if token.type == tokenize.NAME}  # comments and strings may


def test_no_retired_name_is_left() -> None:
    names = retired()
    assert len(names) > 60
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    assert len(files) > 500
    found = {path.relative_to(ROOT).as_posix(): used for path in files if (used := identifiers(path, names))}
    assert not found
