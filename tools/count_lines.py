"""Count the lines of the package: `python -m tools.count_lines`.

Each line of a Python file is one of code, of a docstring, of comments alone, or blank. The output has a row for each
room of the package, and the totals.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "quire"


class Lines(NamedTuple):
    """Numbers of lines by what they hold."""

    code: int = 0
    docstrings: int = 0
    comments: int = 0
    blank: int = 0

    @property
    def total(self) -> int:
        """All lines."""
        return sum(self)

    def plus(self, other: Lines) -> Lines:
        """Add up two counts."""
        return Lines(*map(sum, zip(self, other, strict=True)))


def count(source: str) -> Lines:
    """Count the lines of a file."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    code: set[int] = set()
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    comments = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in ignored:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstrings
    total = len(source.splitlines())
    alone = comments - code - docstrings
    return Lines(len(code), len(docstrings), len(alone), total - len(code | docstrings | alone))


def main() -> int:
    """Print the counts."""
    rooms: dict[str, Lines] = {}
    files: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0]
        rooms[room] = rooms.get(room, Lines()).plus(count(path.read_text(encoding="utf-8")))
        files[room] += 1
    whole = Lines()
    for lines in rooms.values():
        whole = whole.plus(lines)
    rows = [*rooms.items(), ("all", whole)]
    files["all"] = sum(files.values())
    print(f"{'':14}{'files':>7}{'lines':>9}{'code':>9}{'docstrings':>12}{'comments':>10}{'blank':>8}")
    for room, lines in rows:
        print(
            f"{room:14}{files[room]:7}{lines.total:9,}{lines.code:9,}{lines.docstrings:12,}{lines.comments:10,}"
            f"{lines.blank:8,}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
