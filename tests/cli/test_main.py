"""The command starts fast, and says in one line what was wrong."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import quire
from quire.cli.main import build_parser, main, parse_args

HEAVY = ("torch", "numpy", "quire.engine", "quire.text", "tokenizers", "jinja2", "starlette", "uvicorn", "rich")


@pytest.mark.parametrize(
    "flags",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["serve", "--help"],
        ["bench", "--help"],
        ["bench", "serve", "--help"],
        ["plan", "--help"],
    ],
)
def test_help_and_version_import_nothing_heavy(flags: list[str]) -> None:
    script = (
        "import sys\nfrom quire.cli.main import main\n"
        f"try: main({flags!r})\nexcept SystemExit as end: assert end.code == 0, end.code\n"
        f"print('heavy:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "heavy: []"


def test_the_package_is_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "quire", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"quire {quire.__version__}\n"


@pytest.mark.parametrize(
    "start", ["import runpy\nrunpy.run_module('quire', run_name='__main__')", "from {0} import {1}\nsys.exit({1}())"]
)
def test_ctrl_c_during_the_imports_leaves_no_traceback(start: str) -> None:
    # The second form is that of the script which an installation makes.
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    script = (
        "import signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's job in the background ignores it
        "class Interruption:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'quire.cli.options': signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interruption())\n"
    )
    command = [sys.executable, "-c", script + start.format(*project["scripts"]["quire"].split(":")), "--version"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


def test_every_command_is_there() -> None:
    for command in ("generate", "chat", "serve", "bench", "bench serve", "plan", "doctor", "replay"):
        with pytest.raises(SystemExit) as exit_:
            parse_args([*command.split(), "--help"])
        assert exit_.value.code == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature must be a number from 0 to 100, got -1.0"),
        (["generate", "--prompt", "a", "--block-size", "0"], "block_size must be an integer of at least 1"),
        (["generate", "--prompt", "a", "--logprobs", "1"], "--logprobs needs --json"),
        (["generate", "--prompt", "a", "--prompt", "b", "--stream"], "--stream takes one prompt"),
        (["generate", "--prompt", "a", "--n", "2", "--stream"], "--stream takes n=1"),
        (["generate", "--prompts-file", "/no/such\nfile"], "cannot be read"),
        (["generate", "--demo", "--json"], "has neither --json nor --stream"),
        (["generate", "./no-such-folder"], "there is no prompt"),
        (["generate", "./no-such-folder", "--prompt", "a"], "no-such-folder"),
        (["generate", "--prompt", "a", "--max-model-len", "9999"], "max_model_len (9999) is more than"),
        (["generate", "--prompt", "a", "--num-kv-blocks", "1"], "num_kv_blocks=1 gives 1 KV blocks"),
        (["chat", "--n", "2"], "n has no place in a chat"),
        (["chat", "--top-p", "0"], "top_p must be"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("quire: error: ")
    assert words in shown.err
    assert shown.err.count("\n") == 1


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 0
    assert "quantize" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["sreve"], "unknown command 'sreve': did you mean serve?"),
        (["frobnicate"], "unknown command 'frobnicate': there are generate, chat, serve"),
        (["serve", "--prot", "80"], "did you mean --port?"),
        (["serve", "--temprature", "1"], "unrecognized arguments: --temprature"),
        (["serve", "-n"], "unrecognized arguments: -n; quire serve --help has the options"),
        (["bench", "serve", "-n"], "unrecognized arguments: -n; quire bench serve --help has the options"),
        (["bench", "--workload", "W9"], "invalid choice: 'W9'"),
    ],
)
def test_a_misspelt_name_is_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(flags)
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert shown.count("\n") == 1


def test_the_usage_of_every_command_is_one_line() -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    for name, parser in commands.choices.items():
        usage = parser.format_usage().strip()
        assert usage.startswith(f"usage: quire {name}")
        assert usage.endswith("[options]")
        assert "\n" not in usage
