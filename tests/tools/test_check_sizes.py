"""The size budget: what counts, what is let through with a warning, what fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_sizes import Excess, excesses, folder_excesses, kernel_excesses, tiny_modules


def found(tmp_path: Path, source: str) -> list[Excess]:
    """Return what the check says about one file."""
    path = tmp_path / "module.py"
    path.write_text(source, encoding="utf-8")
    return list(excesses(path, path.name))


@pytest.mark.parametrize(("num_lines", "verdict"), [(600, None), (601, False), (620, False), (621, True)])
def test_a_file_may_have_600_lines_and_fails_past_620(tmp_path: Path, num_lines: int, verdict: bool | None) -> None:
    found_here = found(tmp_path, "x = 1\n" * num_lines)
    assert [excess.is_failure for excess in found_here] == ([] if verdict is None else [verdict])


@pytest.mark.parametrize(("num_lines", "verdict"), [(60, None), (61, False), (65, False), (66, True)])
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_a_function_may_have_60_lines_and_fails_past_65(
    tmp_path: Path, num_lines: int, verdict: bool | None, keyword: str
) -> None:
    found_here = found(tmp_path, f"{keyword} f():\n" + "    x = 1\n" * (num_lines - 1))
    assert [excess.is_failure for excess in found_here] == ([] if verdict is None else [verdict])


def test_docstring_comments_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    docstring = '    """First.\n' + "    more\n" * 40 + '    """\n'
    assert found(tmp_path, "def f():\n" + docstring + "    # why\n\n" * 40 + "    x = 1\n" * 59) == []


def test_a_long_string_that_is_no_docstring_counts(tmp_path: Path) -> None:
    source = 'def f():\n    x = 1\n    y = """\n' + "    words\n" * 70 + '    """\n'
    assert [excess.size for excess in found(tmp_path, source)] == [74]


def test_a_method_inside_a_class_is_named_with_its_line(tmp_path: Path) -> None:
    source = "class A:\n    def method(self):\n" + "        x = 1\n" * 70
    assert [excess.where for excess in found(tmp_path, source)] == ["module.py:2 method"]


@pytest.mark.parametrize(("num_columns", "is_failure"), [(120, False), (121, True)])
def test_a_line_of_a_kernel_has_at_most_120_columns(tmp_path: Path, num_columns: int, is_failure: bool) -> None:
    path = tmp_path / "kernel.cpp"
    path.write_text("int x;\n" + "/" * num_columns + "\n", encoding="utf-8")
    assert [excess.is_failure for excess in kernel_excesses(path, path.name)] == ([True] if is_failure else [])


@pytest.mark.parametrize(
    ("folder", "num_modules", "is_found"), [("a", 20, False), ("a", 21, True), ("models/families", 30, False)]
)
def test_a_folder_has_at_most_20_modules_unless_it_is_a_table(
    tmp_path: Path, folder: str, num_modules: int, is_found: bool
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    for idx in range(num_modules):
        (tmp_path / folder / f"m{idx}.py").touch()
    (tmp_path / folder / "__init__.py").touch()
    assert [(excess.where, excess.size) for excess in folder_excesses(tmp_path)] == (
        [(folder, num_modules)] if is_found else []
    )


@pytest.mark.parametrize(
    ("folder", "num_lines", "users", "is_found"),
    [
        ("a", 59, 1, True),
        ("a", 60, 1, False),
        ("a", 59, 2, False),
        ("a", 59, 0, False),
        ("models/families", 59, 1, False),
    ],
)
def test_a_small_module_with_one_importer_is_a_warning(
    tmp_path: Path, folder: str, num_lines: int, users: int, is_found: bool
) -> None:
    (tmp_path / "quire" / folder).mkdir(parents=True)
    (tmp_path / "quire" / folder / "small.py").write_text("x = 1\n" * num_lines)
    package = "quire." + folder.replace("/", ".")
    forms = [f"from {package}.small import x\n", f"from {package} import small\n"]
    for idx in range(users):
        (tmp_path / "quire" / f"user{idx}.py").write_text(forms[idx])
    expected = f"small: {package}.small: {num_lines} lines (least 60), imported by quire.user0 alone"
    assert list(tiny_modules(tmp_path)) == ([expected] if is_found else [])
