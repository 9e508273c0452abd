"""The check of docstrings and comments."""

from pathlib import Path

import pytest

from tools import check_prose

PLAIN = '''"""A cache of blocks."""


def take(count: int) -> list[int]:
    """Return block ids, or none if the pool is empty.

    Args:
        count: number of blocks.
    """
    return [*range(count)]  # the order in which they were freed
'''


def _write(folder: Path, source: str) -> Path:
    path = folder / "module.py"
    path.write_text(source, encoding="utf-8")
    return path


def test_plain_english_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_prose.main([str(_write(tmp_path, PLAIN))]) == 0
    assert "1 files, 0 findings" in capsys.readouterr().out
    assert not check_prose.find_idioms([tmp_path / "module.py"]).lines


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("Return block ids", "What is free", "docstring"),
        ("number of blocks", "of what size", "argument"),
        ("count: number", "size: number", "no such argument"),
        ("    return [*", "    # Whose turn it is\n    return [*", "comment"),
    ],
)
def test_a_text_without_a_subject_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, kind: str
) -> None:
    assert check_prose.main([str(_write(tmp_path, PLAIN.replace(old, new)))]) == 1
    assert f": {kind}: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("or none if the pool is empty", "or what there is"),
        ("or none if the pool is empty", "or none where the pool is empty"),
        ("number of blocks", "that of blocks"),
        ("the order in which they were freed", "behind those that were freed"),
    ],
)
def test_idioms_are_counted_with_their_lines(tmp_path: Path, old: str, new: str) -> None:
    path = _write(tmp_path, PLAIN.replace(old, new))
    idioms = check_prose.find_idioms([path])
    line = 1 + next(number for number, text in enumerate(path.read_text("utf-8").splitlines()) if new in text)
    assert [text.split(": ")[0] for text in idioms.lines] == [f"{path}:{line}"]
    assert idioms.rate == pytest.approx(1000 / idioms.num_words)
