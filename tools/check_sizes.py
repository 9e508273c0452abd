"""Check the sizes of files, functions and folders.

A file is a concept, of at most 600 lines. A function has at most 60 lines of code (signature and
body without docstring, blank lines and comments). A slightly larger one is a warning, to be fixed with the next change
of the file; above 620 and 65 lines the check fails. It also fails for a line of a kernel with more than 120 columns,
which `.clang-format` avoids, and for a folder of the package with more than 20 modules, unless these are a table of
like things. A module of the package below 60 lines that only one other imports is a warning: it may be one concept with
its importer.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.count_import_cycles import import_graph

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tools", "tests", "benchmarks")
KERNELS = ROOT / "src" / "quire" / "ops" / "native"
MAX_COLUMNS = 120


class Budget(NamedTuple):
    """Limits of a number of lines: above `good` is a warning, above `most` a failure."""

    good: int
    most: int


FILE_BUDGET = Budget(good=600, most=620)
FUNCTION_BUDGET = Budget(good=60, most=65)
FOLDER_BUDGET = Budget(good=20, most=20)
LEAST_LINES = 60
# Folders with a file for each of many like things.
TABLES = frozenset(
    {
        *("models/families", "models/gguf/architectures", "models/stored_quantization", "ops/triton/kernels"),
        "text/tool_calls",
    }
)


class Excess(NamedTuple):
    """A file, a function or a line that exceeds its budget."""

    where: str
    size: int
    budget: Budget
    unit: str = "lines"

    @property
    def is_failure(self) -> bool:
        """True where the excess is a failure, not a warning."""
        return self.size > self.budget.most


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Return the number of lines of code of a function."""
    skipped: range = range(0)
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        skipped = range(first.lineno, (first.end_lineno or first.lineno) + 1)
    numbers = range(function.lineno, (function.end_lineno or function.lineno) + 1)
    code = (lines[number - 1].strip() for number in numbers if number not in skipped)
    return sum(1 for line in code if line and not line.startswith("#"))


def excesses(path: Path, name: str) -> Iterator[Excess]:
    """Yield the excesses in a file.

    Args:
        path: path of the file.
        name: name of the file in messages.
    """
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    if len(lines) > FILE_BUDGET.good:
        yield Excess(name, len(lines), FILE_BUDGET)
    for node in ast.walk(ast.parse(source, filename=name)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = function_lines(node, lines)
            if count > FUNCTION_BUDGET.good:
                yield Excess(f"{name}:{node.lineno} {node.name}", count, FUNCTION_BUDGET)


def kernel_excesses(path: Path, name: str) -> Iterator[Excess]:
    """Yield the excesses of a C++ file: its lines, and lines that are too wide."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) > FILE_BUDGET.good:
        yield Excess(name, len(lines), FILE_BUDGET)
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield Excess(f"{name}:{number}", len(line), Budget(MAX_COLUMNS, MAX_COLUMNS), "columns")


def folder_excesses(package: Path) -> Iterator[Excess]:
    """Yield the folders of a package that have too many modules."""
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        name = folder.relative_to(package).as_posix()
        count = sum(path.name != "__init__.py" for path in folder.glob("*.py"))
        if name not in TABLES and count > FOLDER_BUDGET.good:
            yield Excess(name, count, FOLDER_BUDGET, "modules")


def tiny_modules(root: Path) -> Iterator[str]:
    """Yield a line for each small module of the package `quire` in a folder that one other module imports."""
    graph = import_graph(root, "quire", in_functions=True)
    for path in sorted((root / "quire").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name, folder = ".".join(parts), "/".join(parts[1:-1])
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count >= LEAST_LINES or parts[-1] == "__init__" or folder in TABLES:
            continue
        users = [user for user, names in graph.items() if name in names]
        if len(users) == 1:
            yield f"small: {name}: {count} lines (least {LEAST_LINES}), imported by {users[0]} alone"


def main() -> int:
    """Check every Python file, kernel and folder of the project; return 1 if there is a failure."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    kernels = sorted((*KERNELS.glob("*.h"), *KERNELS.glob("*.cpp")))
    found = [excess for path in paths for excess in excesses(path, str(path.relative_to(ROOT)))]
    found += [excess for path in kernels for excess in kernel_excesses(path, str(path.relative_to(ROOT)))]
    found += folder_excesses(ROOT / "src" / "quire")
    for excess in found:
        word = "too long" if excess.is_failure else "long"
        print(f"{word}: {excess.where}: {excess.size} {excess.unit} (budget {excess.budget.good})")
    small = list(tiny_modules(ROOT / "src"))
    for line in small:
        print(line)
    failures = sum(excess.is_failure for excess in found)
    warnings = len(found) - failures + len(small)
    print(f"sizes: {len(paths) + len(kernels)} files, {warnings} warnings, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
