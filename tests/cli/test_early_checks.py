"""Mistakes in names, folders and options are reported before torch is imported."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import quire

BUNDLED = Path(quire.__file__).parent / "models" / "bundled"
# All commands in one interpreter, which starts once: none of them may have imported torch.
SCRIPT = """
import contextlib, io, json, sys
from quire.cli.main import main

found = []
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(command)
        except SystemExit as end:
            code = end.code
    found.append([code, "torch" in sys.modules, errors.getvalue().strip().splitlines()[-1]])
print(json.dumps(found))
"""
MISTAKES = (
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
    (["serve", "--quantization", "awq"], "got 'awq': the checkpoint has plain weights, which int8 and int4 round"),
    (
        ["serve", "--quantization", "bitsandbytes"],
        "must be one of int8, int4 or None, got 'bitsandbytes': how a",
    ),
    (["serve", "~no_such_user/model"], "model '~no_such_user/model' does not exist"),
    (["generate", "--prompt", "a", "./" + "x" * 300], "does not exist: name a folder"),
    (["serve", "--kv-cache-memory-bytes", "4"], 'for GiB, write kv_cache_memory_bytes="4GiB" (on the command line: '),
    (["generate", "--prompt", "a", "--regex", "(a"], "--regex must be a regular expression that compiles: unclosed"),
    (["generate", "--prompt", "a", "--lora-name", "sql"], "--lora-name must be left out without --lora-modules"),
    (["bench", "--input-len", "100000"], "--input-len and --output-len together must be at most the context of 1,024"),
    (["bench", "--input-len", "1000"], "must be at most the context of 1,024 tokens, got 1,064"),
    (["bench", "--workload", "W6-4k"], "the longest request of W6-4k must be at most the context of 1,024 tokens"),
    (["bench", "--fit", "/no/such/folder/file"], "fit /no/such/folder/file cannot be written"),
    (["bench", "quality", "--text", "/no/such/file"], "text /no/such/file cannot be read: No such file or directory"),
    (["bench", "quality", "--greedy", "99x2"], "greedy prompts must be at most"),
    (["inspect", "/no/such/folder"], "model '/no/such/folder' does not exist: name a folder"),
    (["inspect", "EMPTY"], "has neither model.safetensors nor"),
    (["quantize", "/no/such/folder", "out", "--to", "int8"], "model '/no/such/folder' does not exist"),
    (["quantize", "bundled", "FOLDER", "--to", "int4"], "exists already, and nothing is overwritten"),
    (["quantize", "bundled", "/no/such/folder/out", "--to", "q8_0"], "/no/such/folder is no folder"),
    (
        ["quantize", "bundled", "out", "--to", "int4", "--calibration", "/no/such/file"],
        "calibration /no/such/file cannot",
    ),
    # Else transformers is asked, which needs torch.
    (["bench", "FOLDER", "--model-impl", "native"], "the architecture 'Other' is not implemented"),
    (["chat", "FOLDER", "--enable-eplb"], "enable_eplb must be False or absent, got True"),
)


# Options, and what is said where the packages of extras are missing.
EXTRAS = (
    (
        ["--prefix-cache-dir", f"{__file__}/folder"],
        "prefix_cache_dir needs lmdb, not installed here: pip install 'quire[disk]'",
    ),
    (["--prefix-cache-url", "redis://127.0.0.1:1"], "prefix_cache_url needs redis, not installed here"),
    (
        ["--kv-events-config", '{"enable_kv_cache_events": true, "publisher": "zmq"}'],
        "kv_events_config needs msgspec and zmq, not installed here: pip install 'quire[events]'",
    ),
)


def test_missing_packages_are_reported_without_torch() -> None:
    commands = [["generate", "--prompt", "a", *flags] for flags, _ in EXTRAS] + [["serve", *EXTRAS[0][0]]]
    without = "import sys\nsys.modules |= dict.fromkeys(('lmdb', 'redis', 'msgspec', 'zmq'))\n"
    command = [sys.executable, "-c", without + SCRIPT, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    words = [*(words for _, words in EXTRAS), EXTRAS[0][1]]
    for wanted, (code, has_torch, error) in zip(words, json.loads(done.stdout), strict=True):
        assert (code, has_torch) == (2, False), error
        assert wanted in error


def test_mistakes_are_reported_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    (tmp_path / "model.safetensors").touch()
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_bytes((BUNDLED / "config.json").read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        values = {"FOLDER": str(tmp_path), "EMPTY": str(empty), "TAKEN": str(taken.getsockname()[1])}
        commands = [[values.get(flag, flag) for flag in flags] for flags, _ in MISTAKES]
        command = [sys.executable, "-c", SCRIPT, json.dumps(commands)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    for (flags, words), (code, has_torch, error) in zip(MISTAKES, json.loads(done.stdout), strict=True):
        assert (code, has_torch) == (2, False), flags
        assert words in error
