"""Counting of lines: each is of one kind."""

from __future__ import annotations

from pathlib import Path

from tools.count_lines import Lines, count

SOURCE = '''"""A module.

Of two lines.
"""

X = """text,
not a docstring
"""  # with a comment


# alone
def f() -> None:
    """One line."""
    # alone
    return None  # beside code
'''


def test_each_line_has_one_kind() -> None:
    assert count(SOURCE) == Lines(code=5, docstrings=5, comments=2, blank=3)
    assert count("") == Lines()


def test_kinds_add_up_to_all_lines() -> None:
    for path in Path(__file__).parent.glob("*.py"):
        source = path.read_text(encoding="utf-8")
        found = count(source)
        assert found.total == len(source.splitlines())
        assert min(found) >= 0
