"""`quire replay` says what a log holds, and where it goes wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.memory.recording.recorder import VERSION

STORY = "Once upon a time, a small fox found a red kite in the forest. "


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a command that generated with the bundled model."""
    path = tmp_path_factory.mktemp("replay") / "memory.log"
    flags = ["--record-memory", str(path), "--num-kv-blocks", "64", "--max-model-len", "256", "--n", "2"]
    flags += ["--prompt", STORY + "Then", "--prompt", STORY + "But", "--max-tokens", "24", "--block-size", "4"]
    assert main(["generate", *flags]) == 0
    return path


def test_a_sound_log_passes(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(log)]) == 0
    shown = capsys.readouterr().out
    assert "sequences  4 opened, 0 live at the end" in shown
    assert "Every command gave what was recorded, and every invariant held." in shown
    assert main(["replay", str(log), "--json", "--check-every", "50"]) == 0
    report = json.loads(capsys.readouterr().out)
    num_commands = sum(report["num_commands"].values())
    assert (report["fault"], report["is_truncated"]) == (None, False)
    assert report["num_checks"] == -(-num_commands // 50)
    assert report["usage"]["used"] == 0


def test_damage_is_named_by_its_line(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = log.read_text().splitlines(keepends=True)
    idx = next(i for i, line in enumerate(lines) if line.startswith("s "))
    lines[idx] = lines[idx].rstrip("\n") + "0\n"
    damaged = tmp_path / "damaged.log"
    damaged.write_text("".join(lines))
    assert main(["replay", str(damaged)]) == 1
    assert f"FAULT in line {idx + 1}: invariant M10: the log says 's " in capsys.readouterr().out
    assert main(["replay", str(damaged), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fault"]["line"] == idx + 1


def test_a_log_that_is_cut_off_is_tolerated(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.log"
    cut.write_bytes(log.read_bytes()[:-3])
    assert main(["replay", str(cut)]) == 0
    assert "the last line is not whole, and was not run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "this is not a log of memory commands"),
        (bytes(range(256)) * 9, "this is not a log of memory commands"),
        (b"quire memory log 99 {}\n", f"the log has version 99, and only version {VERSION} can be replayed"),
        (f"quire memory log {VERSION} {{\n".encode(), "the first line of the log is damaged"),
    ],
)
def test_what_is_no_log_is_a_mistake(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rubbish"
    path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"quire: error: {path}: {words}")


def test_a_file_that_is_not_there_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "nothing")]) == 2
    assert "nothing cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_check_every_is_positive(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["replay", "log", f"--check-every={value}"])
    assert exit_.value.code == 2
    assert "is not an integer of at least 1" in capsys.readouterr().err
