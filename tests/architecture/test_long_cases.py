"""The list of long cases names tests that exist, each once and in order."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONG_CASES, NEVER_LONG

ROOT = Path(__file__).resolve().parents[2]


def test_every_listed_case_is_of_a_test() -> None:
    cases = LONG_CASES.read_text(encoding="utf-8").splitlines()
    assert cases == sorted(set(cases))
    assert not [case for case in cases if case.startswith(NEVER_LONG)]
    for case in cases:
        module, _, name = case.partition("::")
        function = name.rpartition("::")[2].partition("[")[0]
        source = (ROOT / module).read_text(encoding="utf-8")
        known = re.search(rf"^\s*(?:async )?def {function}\(|^(Test\w+) = ", source, re.MULTILINE)
        assert known, f"{case}: there is no such test any more; remove its line"


@pytest.mark.slow
def test_every_listed_case_is_collected() -> None:
    """A case that was renamed by its parameters would be in each default run."""
    cases = LONG_CASES.read_text(encoding="utf-8").splitlines()
    files = sorted({case.partition("::")[0] for case in cases})
    options = ["--collect-only", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = {line.strip() for line in done.stdout.splitlines()}
    assert [case for case in cases if case not in collected] == []
