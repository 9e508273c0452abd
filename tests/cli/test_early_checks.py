"""Mistakes in names, folders and options are reported before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from quire.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print(code, "torch" in sys.modules)
"""


def run(*flags: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, *flags], capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["serve", "/no/such/folder"], "model '/no/such/folder' does not exist and is no hub id either"),
        (["serve", "--speculative-method", "draft", "--draft-model", "./none"], "model './none' does not exist"),
        (["serve", "--prefix-cache-dir", f"{__file__}/folder"], "is no folder that can be written"),
        (["serve", "--port", "70000"], "port must be from 0 to 65535"),
        (["generate", "--prompt", "a", "--dtype", "int3"], "dtype must be one of"),
        (["bench", "FOLDER"], "the architecture 'Other' is not implemented"),
        (["chat", "FOLDER", "--enable-eplb"], "enable_eplb must be False or absent, got True"),
    ],
)
def test_a_mistake_is_reported_without_torch(flags: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    end, error = run(*(str(tmp_path) if flag == "FOLDER" else flag for flag in flags))
    assert end == "2 False"
    assert words in error
