"""Mistakes in names, folders and options are reported before torch is imported."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import quire

BUNDLED = Path(quire.__file__).parent / "bundled"
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
        (["serve", "/no/such/folder"], "model '/no/such/folder' does not exist: name a folder"),
        (["serve", "--speculative-method", "draft", "--draft-model", "./none"], "model './none' does not exist"),
        (["serve", "--prefix-cache-dir", f"{__file__}/folder"], "is no folder that can be written"),
        (["serve", "--port", "70000"], "port must be from 0 to 65535"),
        (["serve", "--port", "TAKEN"], "cannot listen on 127.0.0.1 port"),
        (["serve", "--merge-lora", "--lora-modules", "a=/b", "--allow-runtime-lora-updating"], "leaves no model"),
        (["generate", "--prompt", "a", "--merge-lora"], "exactly one adapter in lora_modules, got 0"),
        (["serve", "gpt-oss-20b"], "could not be fetched from the hub: the hub cannot be reached"),
        (["serve", "EMPTY"], "has neither model.safetensors nor"),
        (["generate", "--prompt", "a", "--dtype", "int3"], "dtype must be one of"),
        (["bench", "FOLDER"], "the architecture 'Other' is not implemented"),
        (["chat", "FOLDER", "--enable-eplb"], "enable_eplb must be False or absent, got True"),
    ],
)
def test_a_mistake_is_reported_without_torch(flags: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_bytes((BUNDLED / "config.json").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"FOLDER": str(tmp_path), "EMPTY": str(empty), "TAKEN": str(taken.getsockname()[1])}
        end, error = run(*(values.get(flag, flag) for flag in flags))
    assert end == "2 False"
    assert words in error
