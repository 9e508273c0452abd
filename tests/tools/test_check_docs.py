"""The check of Markdown lines: prose is held to the limit, tables and fenced code are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_docs

WIDE = "word " * 25


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a" * 120, []),
        ("a" * 121, [1]),
        (f"# Title\n\n- {WIDE}\n", [3]),
        (f"| {WIDE} |\n", []),
        (f"```sh\n{WIDE}\n```\n{WIDE}\n", [4]),
        (f"- item\n\n  ```\n  {WIDE}\n  ```\n", []),
    ],
)
def test_lines_outside_tables_and_code_are_counted(text: str, numbers: list[int]) -> None:
    assert [line.number for line in check_docs.long_lines(text)] == numbers


def test_a_wide_line_anywhere_under_docs_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs" / "lab").mkdir(parents=True)
    (tmp_path / "README.md").write_text("short\n", encoding="utf-8")
    assert check_docs.main(tmp_path) == 0
    (tmp_path / "docs" / "lab" / "page.md").write_text(f"short\n{WIDE}\n", encoding="utf-8")
    assert check_docs.main(tmp_path) == 1
    assert "docs/lab/page.md:2" in capsys.readouterr().out
