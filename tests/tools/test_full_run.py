"""Which long suites a commit needs."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import MODEL_FIXTURES, SHARED_FOLDERS, by_share
from tools import full_run

SOURCE = '"""A kernel."""\n\n\ndef double(x: int) -> int:\n    """Double."""\n    return 2 * x  # a shift\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folders in full_run.PARTS.values():
        for folder in folders:
            (tmp_path / folder / "wing").mkdir(parents=True)
            (tmp_path / folder / "wing" / "kernel.py").write_text(SOURCE, "utf-8")
            (tmp_path / folder / "wing" / "kernel.cpp").write_text("int two = 2;\n", "utf-8")
    return tmp_path


def _page(root: Path, *parts: str) -> Path:
    page = root / "full-runs.md"
    cells = " | ".join(f"`{full_run.digest_of(part, root)}`" for part in parts)
    page.write_text(f"# Runs\n\n| date | code |\n|---|---|\n| 2026-01-01 | `0` |\n| 2026-01-02 | {cells} |\n", "utf-8")
    return page


def test_code_of_the_last_full_run_needs_no_long_suites(root: Path) -> None:
    assert full_run.changed_parts(root, _page(root, "ops", "steps")) == []
    assert full_run.changed_parts(root, _page(root, "steps")) == ["ops"]
    (root / "full-runs.md").write_text("# Runs\n", "utf-8")
    assert full_run.changed_parts(root, root / "full-runs.md") == ["ops", "steps"]


@pytest.mark.parametrize(
    ("name", "old", "new", "changes"),
    [
        ("kernel.py", "2 * x", "3 * x", True),
        ("kernel.py", "a shift", "an addition", False),
        ("kernel.py", "Double.", "Twice as much.", False),
        ("kernel.py", "A kernel.", "Kernels.", False),
        ("kernel.cpp", "= 2", "= 3", True),
    ],
)
def test_only_code_counts(root: Path, name: str, old: str, new: str, changes: bool) -> None:
    page, path = _page(root, "ops", "steps"), root / "src/quire/ops/wing" / name
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")
    assert full_run.changed_parts(root, page) == (["ops"] if changes else [])


def test_a_new_or_moved_file_counts(root: Path) -> None:
    page, path = _page(root, "ops", "steps"), root / "src/quire/execution/wing/kernel.py"
    path.rename(path.with_name("other.py"))
    assert full_run.changed_parts(root, page) == ["steps"]


def test_unchanged_kernels_run_on_the_level_of_the_commit() -> None:
    levels = ["portable", "avx2", "avx_vnni"]
    chosen = [full_run.levels_to_run(levels, ["steps"], f"{number:040x}"[::-1]) for number in range(3 * 16)]
    assert {len(each) for each in chosen} == {1}
    assert {level for each in chosen for level in each} == set(levels)
    assert full_run.levels_to_run(levels, ["ops"], "f" * 40) == levels
    assert full_run.levels_to_run(levels, [], None) == levels
    assert full_run.levels_to_run([], [], "f" * 40) == []


def test_a_recorded_run_is_the_last_row(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = _page(root)
    monkeypatch.setattr(full_run, "_commit", lambda: "0123456789abcdef")
    row = full_run.record(1234, page)
    assert page.read_text("utf-8").endswith(f"{row}\n")
    assert "| 01234567 | 1234 s |" in row
    assert full_run.changed_parts(full_run.ROOT, page) == []


def test_each_commit_has_a_share_of_the_models() -> None:
    shares = [full_run.share_to_run(f"{number:08x}".rjust(16, "a") + "0" * 24) for number in range(300)]
    assert {shares.count(f"{idx}/{full_run.NUM_SHARES}") for idx in range(full_run.NUM_SHARES)} == {60}
    assert full_run.share_to_run(None) == f"0/{full_run.NUM_SHARES}"


def case_of(nodeid: str, params: dict[str, Any] | None = None, mark: str = "slow") -> Any:
    callspec = None if params is None else SimpleNamespace(params=params, id=nodeid.partition("[")[2])
    return SimpleNamespace(nodeid=nodeid, callspec=callspec, get_closest_marker=lambda name: name == mark or None)


def test_shares_divide_the_cases_of_the_shared_folders() -> None:
    assert all((full_run.ROOT / folder).is_dir() for folder in SHARED_FOLDERS)
    models = [f"model-{number}" for number in range(60)]
    names = dict(zip(SHARED_FOLDERS, [*MODEL_FIXTURES, *["seed"] * 9], strict=False))
    modules = {f"{folder}test_it.py": name for folder, name in names.items()} | {"tests/server/test_it.py": "reference"}
    items = [case_of(f"{module}::test_it[{one}]", {name: one}) for module, name in modules.items() for one in models]
    items.append(case_of(f"{SHARED_FOLDERS[0]}test_it.py::test_other"))
    items.append(case_of(f"{SHARED_FOLDERS[0]}test_it.py::test_other[quick]", {"seed": 1}, mark="long"))
    shares = [by_share(items, f"{number}/3")[0] for number in range(3)]
    for folder in SHARED_FOLDERS:
        test = f"{folder}test_it.py::test_it"
        of_folder = [[each.nodeid for each in kept if each.nodeid.startswith(test)] for kept in shares]
        assert sorted(chain.from_iterable(of_folder)) == sorted(f"{test}[{model}]" for model in models)
        assert min(map(len, of_folder)) > 10
    assert all(len([each for each in kept if "::test_other" in each.nodeid]) == 2 for kept in shares)
    assert all(len([each for each in kept if "tests/server" in each.nodeid]) == len(models) for kept in shares)
    assert all(len(kept) + len(others) == len(items) for kept, others in [by_share(items, "1/3")])
