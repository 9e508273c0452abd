"""The long suites that a commit needs: `python -m tools.full_run changed | levels LEVEL ... | share | record SECONDS`.

Products of kernels' cases, kernels in Triton's interpreter and compiled for GPUs, and models on the lower levels of
instructions take most of CI's time, and have the same result as long as the code that they run has not changed. `make
kernels` runs them all and adds a row to `docs/lab/full-runs.md` with a digest of that code. CI leaves out the suites of
code that has the digest of the last row, and one lower level, which follows from the commit, runs in any case. So does
a share of slow suites with cases for many models or seeds (`--share` of the tests), which follows from the commit too.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs/lab/full-runs.md"
# Code that each group of suites runs. A model's steps run in Triton's interpreter as well.
PARTS: Final = {
    "ops": ("src/quire/ops", "tests/ops"),
    "steps": ("src/quire/execution", "src/quire/models/modules"),
}
SUFFIXES: Final = frozenset({".cpp", ".h", ".py"})
NUM_DIGITS: Final = 16
# Successive commits run each share of the models after some of them.
NUM_SHARES: Final = 5


def digest_of(part: str, root: Path = ROOT) -> str:
    """Return the digest of a part's code; docstrings and comments of Python files have no influence on it."""
    digest = hashlib.sha256()
    paths = (path for folder in PARTS[part] for path in (root / folder).rglob("*") if path.suffix in SUFFIXES)
    for path in sorted(paths):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(_code(path.read_text(encoding="utf-8")) if path.suffix == ".py" else path.read_bytes())
    return digest.hexdigest()[:NUM_DIGITS]


def _code(source: str) -> bytes:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree).encode()


def changed_parts(root: Path = ROOT, page: Path = PAGE) -> list[str]:
    """Return the names of the parts whose code is another than in the last row."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| 2")]
    last = [cell.strip(" `") for cell in rows[-1].split("|")] if rows else []
    return [part for part in PARTS if digest_of(part, root) not in last]


def levels_to_run(levels: Sequence[str], changed: Sequence[str], commit: str | None) -> list[str]:
    """Return all lower levels for changed kernels or an unknown commit; else the one that follows from the commit."""
    if not levels or "ops" in changed or commit is None:
        return list(levels)
    return [levels[int(commit[:8], 16) % len(levels)]]


def share_to_run(commit: str | None) -> str:
    """Return the share of models, as `--share` reads it; the first one for an unknown commit."""
    return f"{0 if commit is None else int(commit[8:16], 16) % NUM_SHARES}/{NUM_SHARES}"


def record(seconds: int, page: Path = PAGE) -> str:
    """Add the row of a run to the page; return it."""
    commit = (_commit() or "")[:8]
    digests = " | ".join(f"`{digest_of(part)}`" for part in PARTS)
    row = f"| {datetime.now(UTC):%Y-%m-%d} | {commit} | {seconds} s | {digests} |"
    page.write_text(f"{page.read_text(encoding='utf-8').rstrip()}\n{row}\n", encoding="utf-8")
    return row


def _commit() -> str | None:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one question, or record a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("changed", help="print the parts whose code has changed since their suites last ran whole")
    levels = commands.add_parser("levels", help="print the lower levels of instructions to run")
    levels.add_argument("levels", nargs="*")
    commands.add_parser("share", help="print the share of models to run")
    recorded = commands.add_parser("record", help="add the row of a run that has passed")
    recorded.add_argument("seconds", type=int)
    options = parser.parse_args(arguments)
    if options.command == "changed":
        print(*changed_parts())
    elif options.command == "levels":
        print(*levels_to_run(options.levels, changed_parts(), _commit()))
    elif options.command == "share":
        print(share_to_run(_commit()))
    else:
        print(record(options.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
