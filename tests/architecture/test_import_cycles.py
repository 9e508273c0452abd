"""Import cycles: the package has none, and the script that counts them finds every kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.count_import_cycles import SOURCE, import_cycles, import_graph, main, report


def cycles_of(folder: Path, **modules: str) -> list[list[str]]:
    """Return the cycles of a package that consists of these modules."""
    package = folder / "package"
    package.mkdir(exist_ok=True)
    for name, source in {"__init__": "", **modules}.items():
        (package / f"{name}.py").write_text(source)
    return import_cycles(import_graph(folder, "package"))


def test_the_package_has_no_cycles() -> None:
    graph = import_graph(SOURCE, "quire")
    assert len(graph) > 100
    cycles = import_cycles(graph)
    assert not cycles, report(cycles, graph)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import package.b", "import package.a"),
        ("from package.b import thing", "from package import a"),
        ("from package import thing, b", "from .a import thing"),
        ("from . import b", "import package.a as other"),
        ("if TYPE_CHECKING:\n    from package.b import Thing", "try:\n    import package.a\nfinally:\n    pass"),
        ("class Holder:\n    from package.b import thing", "import package.a"),
    ],
)
def test_every_form_of_import_is_an_edge(tmp_path: Path, first: str, second: str) -> None:
    assert cycles_of(tmp_path, a=first, b=second) == [["package.a", "package.b"]]


def test_a_longer_cycle_is_one_and_what_leads_to_it_is_not_in_it(tmp_path: Path) -> None:
    found = cycles_of(
        tmp_path,
        above="from package import a",
        a="from package import b",
        b="from package import c, below",
        c="from package import a",
        below="import json",
        own="import package.own",
    )
    assert found == [["package.a", "package.b", "package.c"], ["package.own"]]


def test_a_package_and_its_module_are_a_cycle_where_each_names_the_other(tmp_path: Path) -> None:
    folder = tmp_path / "package" / "sub"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from package.sub.b import thing")
    (folder / "b.py").write_text("from package.sub import other")
    assert cycles_of(tmp_path) == [["package.sub", "package.sub.b"]]
    (folder / "b.py").write_text("thing = 1")
    assert cycles_of(tmp_path) == []


def test_an_import_within_a_function_is_no_edge(tmp_path: Path) -> None:
    assert cycles_of(tmp_path, a="from package import b", b="def late():\n    from package import a") == []


def test_the_command_fails_where_there_is_a_cycle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "quire"
    package.mkdir()
    (package / "a.py").write_text("import quire.b")
    (package / "b.py").write_text("")
    monkeypatch.setattr("tools.count_import_cycles.SOURCE", tmp_path)
    assert main() == 0
    assert capsys.readouterr().out == "import cycles: 2 modules, 0 cycles\n"
    (package / "b.py").write_text("import quire.a")
    assert main() == 1
    assert "  quire.a imports quire.b\n  quire.b imports quire.a\n" in capsys.readouterr().out
