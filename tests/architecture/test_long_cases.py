"""The list of cases that take long names cases that there are: others, renamed since, would be in each default run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_long_case_is_collected() -> None:
    listed = (ROOT / "tests/long_cases.txt").read_text(encoding="utf-8").splitlines()
    files = sorted({case.partition("::")[0] for case in listed})
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "slow or not slow",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    collected = {line.strip() for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert [case for case in listed if case not in collected] == []
    assert listed == sorted(set(listed))
