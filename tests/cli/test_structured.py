"""Command-line flags for structured outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

from quire.cli.main import main

SCHEMA = {
    "type": "object",
    "properties": {"old": {"type": "boolean"}},
    "required": ["old"],
    "additionalProperties": False,
}
TINY = ["--num-threads", "1", "--num-kv-blocks", "128", "--max-model-len", "512"]


def generate(*flags: str) -> int:
    return main(["generate", *TINY, "--prompt", "The sailor was", "--max-tokens", "60", *flags])


def test_each_flag_is_honoured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    (tmp_path / "grammar.lark").write_text('start: "it was " /[0-9]{2}/ " years"')
    assert generate("--json-schema", str(tmp_path / "schema.json")) == 0
    assert type(json.loads(capsys.readouterr().out)["old"]) is bool
    assert generate("--choice", "young", "--choice", "old") == 0
    assert capsys.readouterr().out.strip() in ("young", "old")
    assert generate("--regex", "x{3}y") == 0
    assert capsys.readouterr().out.strip() == "xxxy"
    assert generate("--grammar", str(tmp_path / "grammar.lark")) == 0
    assert capsys.readouterr().out.startswith("it was ")
    assert generate("--json-object", "--max-tokens", "5") == 0
    assert capsys.readouterr().out.startswith("{")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--json-schema", "/nowhere"], "json_schema /nowhere cannot be read"),
        (["--grammar", "/nowhere"], "grammar /nowhere cannot be read"),
        (["--regex", ""], "quire: error: --regex must be a non-empty string"),
        (["--regex", "("], "unclosed group"),
        (["--regex", "("], "quire: error: --regex must be"),
        (["--choice", ""], "quire: error: --choice must be"),
        (["--regex", "a", "--ignore-eos"], "ignore_eos"),
    ],
)
def test_what_is_wrong_is_named(flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(*flags) == 2
    assert says in capsys.readouterr().err


def test_two_forms_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        generate("--regex", "a", "--choice", "a")
    assert "not allowed with" in capsys.readouterr().err
