"""The list of long cases names tests that exist, each once and in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import COLLECTED_CASES, LONG_CASES, NEVER_LONG

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


def test_every_listed_case_is_collected(request: pytest.FixtureRequest) -> None:
    """A case that was renamed by its parameters would be in each default run.

    Of the modules that this run collects: in the default run, those of all cases.
    """
    if any("::" in argument for argument in request.config.args):
        pytest.skip("needs a run of whole modules")
    collected = request.config.stash[COLLECTED_CASES]
    modules = {case.partition("::")[0] for case in collected}
    cases = LONG_CASES.read_text(encoding="utf-8").splitlines()
    assert [case for case in cases if case.partition("::")[0] in modules and case not in collected] == []
