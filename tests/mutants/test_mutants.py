"""Every mutant fails its checkers, and honest code passes them: a checker that never fails proves nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.memory import checkers
from tests.memory.checkers import FAILURES
from tests.mutants.mutants_pool import POOL
from tests.mutants.mutants_prefix import PREFIX, SHORT_DIGESTS
from tests.mutants.mutants_scheduling import SCHEDULING
from tests.mutants.mutants_tables import TABLES
from tests.mutants.mutants_tiers import TIERS
from tests.mutants.table import Checker, Mutant

MUTANTS = (*POOL, *TABLES, *PREFIX, *TIERS, *SCHEDULING)
HONEST = (checkers.media_run, checkers.scheduler_run, checkers.beam_run)
# The default run has other walks, complete searches and references on honest code: test_million.py,
# test_small_worlds.py and test_state_machine.py.
HONEST_SLOW = (
    checkers.audited_run,
    checkers.beam_reference,
    checkers.walk_read_back,
    checkers.host_read_back,
    checkers.media_read_back,
    checkers.walk_reference,
    checkers.host_reference,
    checkers.media_reference,
    checkers.small_world,
    checkers.window_world,
    checkers.hinted_world,
    checkers.state_world,
    checkers.host_world,
    checkers.media_world,
)
# Mutants that fail late in a walk, so that each takes a second or more.
LATE = frozenset(
    {
        "blocks_out_of_window_loaded",
        "demoted_after_reuse",
        "loaded_bytes_permuted",
        "loads_evict_one_another",
        "moved_host_blocks_keep_old_ids",
        "older_snapshots_keep_priority",
        "pin_ignores_media",
        "renewed_hint_keeps_its_age",
        "tiers_ignored_by_loads",
    }
)


def named(checkers: tuple[Checker, ...], *marks: pytest.MarkDecorator) -> list[Any]:
    """Return checkers as parameters of a test."""
    return [pytest.param(checker, id=checker.__name__, marks=marks) for checker in checkers]


@pytest.mark.parametrize(
    ("mutant", "checker"),
    [
        pytest.param(
            mutant,
            checker,
            id=f"{mutant.name} - {checker.__name__}",
            marks=[] if checker is mutant.checkers[0] and mutant.name not in LATE else pytest.mark.slow,
        )
        for mutant in MUTANTS
        for checker in mutant.checkers
    ],
)
def test_checker_fails_on_mutant(monkeypatch: pytest.MonkeyPatch, mutant: Mutant, checker: Checker) -> None:
    for seam in mutant.seams:
        seam.install(monkeypatch)
    with pytest.raises(FAILURES):
        checker()


@pytest.mark.parametrize("checker", [*named(HONEST), *named(HONEST_SLOW, pytest.mark.slow)])
def test_checker_passes_on_honest_code(checker: Checker) -> None:
    checker()


@pytest.mark.slow  # by default test_state_machine.py has colliding digests
def test_honest_code_survives_digest_collisions(monkeypatch: pytest.MonkeyPatch) -> None:
    SHORT_DIGESTS.install(monkeypatch)
    checkers.walk_read_back()


def test_mutants_patch_public_seams() -> None:
    names = [f"{seam.owner.__name__}.{seam.name}" for mutant in MUTANTS for seam in mutant.seams]
    assert [name for name in names if "._" in name] == []
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.name for mutant in MUTANTS} > LATE
