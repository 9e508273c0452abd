"""Plans of `quire plan` as tests read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from tests.models.published import CONFIGS

MIB = 1 << 20


def planned(capsys: pytest.CaptureFixture[str], *flags: str, code: int = 0) -> dict[str, Any]:
    """Run the command with --json and return what it printed."""
    assert main(["plan", *flags, "--json"]) == code
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert result["fits"] is (code == 0)
    return result


def written(folder: Path, name: str, **changes: Any) -> str:
    """Write a published configuration, and return the file's name."""
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name] | changes))
    return str(path)
