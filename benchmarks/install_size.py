"""The size of the installation: `python -m benchmarks.install_size`.

Follows the requirements of Quire, without its extras, through the environment that runs this, and adds up the files
that each distribution has installed.
"""

from __future__ import annotations

import argparse
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from benchmarks import machine

MIB = 1 << 20


class Weight(NamedTuple):
    """One distribution.

    Args:
        required_by: first of the other distributions that requires it.
    """

    name: str
    version: str
    num_bytes: int
    required_by: str


def weights(root: str) -> list[Weight]:
    """Return every distribution that `root` needs, itself first, then the heaviest."""
    found: dict[str, Weight] = {}
    queue = [(root, "")]
    while queue:
        name, required_by = queue.pop(0)
        key = canonical(name)
        if key in found:
            continue
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            continue  # wanted on another system or Python version
        found[key] = Weight(dist.name, dist.version, installed_bytes(dist), required_by)
        queue += [(requirement, dist.name) for requirement in requirements(dist)]
    first, *rest = found.values()
    return [first, *sorted(rest, key=lambda weight: -weight.num_bytes)]


def requirements(dist: Distribution) -> list[str]:
    """Return the names that a distribution requires without any extra."""
    names = []
    for line in dist.requires or []:
        requirement, _, condition = line.partition(";")
        match = re.match(r"[\w.-]+", requirement)
        if match is not None and "extra" not in condition:
            names.append(match[0])
    return names


def installed_bytes(dist: Distribution) -> int:
    """Return the size of a distribution's files; for one installed in place, of its sources."""
    paths = [Path(str(file.locate())) for file in dist.files or []]
    if dist.name == "quire" and not any(path.name == "errors.py" for path in paths):
        paths = [path for path in (machine.HERE.parent / "src").rglob("*") if "__pycache__" not in path.parts]
    return sum(path.stat().st_size for path in paths if path.is_file())


def canonical(name: str) -> str:
    """Return a distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    """Measure, print and save."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = weights("quire")
    for row in rows:
        print(
            f"{row.num_bytes / MIB:8.1f} MiB  {row.name} {row.version}"
            + (f" (for {row.required_by})" * bool(row.required_by))
        )
    total = sum(row.num_bytes for row in rows)
    print(f"{total / MIB:8.1f} MiB  in all")
    print(machine.save("install_size", {"total_bytes": total, "distributions": [row._asdict() for row in rows]}))


if __name__ == "__main__":
    main()
