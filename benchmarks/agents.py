"""Traces of coding agents, for `benchmarks.speculative`: outputs that repeat pieces of earlier requests' outputs.

A session is one agent's task on one module of this package, in six turns: list a directory, read the module, edit it,
write a test, run it, report. Each output is a sentence and a tool call in JSON. Paths, file lists, docstrings and code
are those of the package; sentences are one of three for each turn, arguments and the test follow a template. So later
sessions repeat pieces of earlier outputs, and names, docstrings and edited lines are new in each.

Two kinds of prompts lead to the same outputs:

- **without history**: tools, the task and the last tool result, as where an orchestrator calls agents with fresh
  contexts. What earlier turns and sessions wrote is not in the prompt.
- **with history**: the whole session so far, as in a chat. What earlier sessions wrote is not in the prompt.
"""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "quire"
# Lines of a module that a session reads, and that one of `sources` writes.
NUM_LINES, NUM_SOURCE_LINES = 40, 60
SYSTEM = """You are a coding agent in a repository of Python code. Say in one sentence what comes next, then call one
tool. Tools: """
TOOLS = [
    ("list_files", {"path": "directory", "pattern": "glob", "recursive": "boolean"}),
    ("read_file", {"path": "file", "start_line": "integer", "end_line": "integer"}),
    ("edit_file", {"path": "file", "old_text": "text to replace", "new_text": "replacement"}),
    ("write_file", {"path": "file", "content": "text", "overwrite": "boolean"}),
    ("run_command", {"command": "shell command", "working_directory": "directory", "timeout_s": "integer"}),
]
HEAD = f"{SYSTEM}{json.dumps([{'name': tool, 'parameters': given} for tool, given in TOOLS])}\n"
SENTENCES = {
    "list_files": (
        "I'll start by looking at the structure of the directory to see what is there.",
        "Let me first list the files next to the module.",
        "First, I need an overview of the package.",
    ),
    "read_file": (
        "Now let me read the module itself before I change anything.",
        "I can see the module in the list. Let me take a look at its contents.",
        "Next I will read the file.",
    ),
    "edit_file": (
        "The module is clear now. I'll add a debug message where it begins, and keep its behaviour as it is:",
        "Now I understand the code. Let me make the edit:",
        "I have what I need. The smallest change is to log here:",
    ),
    "write_file": (
        "The edit was applied. Now I'll write a test that imports the module and checks its documentation.",
        "Now let me add a test for this module, so that the change is covered.",
        "Next, a test file.",
    ),
    "run_command": (
        "Let me run the new test to make sure that everything passes.",
        "The file is written. Now I will run the tests.",
        "Now let me verify the change.",
    ),
}
TEST = '''"""Tests of {name}."""

from __future__ import annotations

import importlib
import logging

import pytest

logger = logging.getLogger(__name__)

MODULE = "{name}"


@pytest.fixture(name="module")
def load_module() -> object:
    return importlib.import_module(MODULE)


def test_{function}_is_documented(module: object) -> None:
    assert module.__doc__ is not None
    assert module.__doc__.startswith("{first}")


def test_{function}_logs_nothing_by_default(module: object, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        importlib.reload(module)
    assert caplog.records == []
'''


class Turn(NamedTuple):
    """A request of a trace, and its output."""

    prompt: str
    output: str


def trace(seed: int, num_sessions: int, *, has_history: bool) -> list[Turn]:
    """Return the turns of some sessions, one session after the other, each on another module.

    Args:
        seed: seed of the choice of modules, sentences and edits.
        num_sessions: number of sessions.
        has_history: True for prompts with the whole session so far.
    """
    rng = random.Random(seed)
    paths = rng.sample(_modules(), num_sessions)
    return [turn for path in paths for turn in session(path, rng, has_history=has_history)]


def sources(seed: int, num_modules: int) -> list[Turn]:
    """Return requests that each write the first lines of a module of the package: no template, only what code shares.

    Args:
        seed: seed of the choice of modules.
        num_modules: number of requests.
    """
    turns: list[Turn] = []
    for module in random.Random(seed).sample(_modules(), num_modules):
        path = f"src/quire/{module.relative_to(PACKAGE).as_posix()}"
        content = "\n".join(module.read_text(encoding="utf-8").splitlines()[:NUM_SOURCE_LINES])
        turns.append(Turn(f"{HEAD}Task: write {path}.\n", _call("", "write_file", path=path, content=content)))
    return turns


def session(module: Path, rng: random.Random, *, has_history: bool) -> list[Turn]:
    """Return the turns of a session on a module."""
    path = f"src/quire/{module.relative_to(PACKAGE).as_posix()}"
    name = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    test_path = f"tests/{path.removeprefix('src/quire/').replace('/', '/test_')}"
    source = module.read_text(encoding="utf-8")
    summary = (ast.get_docstring(ast.parse(source)) or name).splitlines()[0]
    shown = source.splitlines()[:NUM_LINES]
    files = "\n".join(sorted(each.name for each in module.parent.glob("*.py")))
    start = rng.randrange(max(1, len(shown) - 3))
    old = "\n".join(shown[start : start + 3])
    test = TEST.format(name=name, function=module.stem, first=" ".join(summary.split()[:4]))
    folder = str(Path(path).parent)
    command = f"python -m pytest -x -q {test_path} && head -1 {path} && ls {folder}"
    seen = f"2 passed\n{summary}\n{files}"
    turns = [
        (_say(rng, "list_files", path=folder, pattern="*.py", recursive=False), files),
        (_say(rng, "read_file", path=path, start_line=1, end_line=NUM_LINES), "\n".join(shown)),
        (_say(rng, "edit_file", path=path, old_text=old, new_text=f'{old}\nlogger.debug("{name}")\n'), "1 edit made"),
        (_say(rng, "write_file", path=test_path, content=test, overwrite=False), "written"),
        (_say(rng, "run_command", command=command, working_directory="/workspace", timeout_s=600), seen),
        (f"All tests pass. The module: {summary}\n{_report(path, test_path, files)}", ""),
    ]
    head = f"{HEAD}Task: let {path} log, and test it.\n"
    prompt, requests = head, []
    for output, result in turns:
        requests.append(Turn(prompt, output))
        prompt = f"{prompt if has_history else head}{output if has_history else ''}\nResult: {result}\n"
    return requests


def _modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]


def _say(rng: random.Random, tool: str, **arguments: Any) -> str:
    """Return a sentence and a tool call."""
    return _call(rng.choice(SENTENCES[tool]), tool, **arguments)


def _call(sentence: str, tool: str, **arguments: Any) -> str:
    """Return a sentence followed by a tool call."""
    return f"{sentence}\n{json.dumps({'name': tool, 'arguments': arguments})}"


def _report(path: str, test_path: str, files: str) -> str:
    """Return the report at the end of a session."""
    report = {"status": "done", "changed_files": [path], "new_files": [test_path], "open_questions": []}
    return f"{json.dumps(report)}\nThe directory now has these files:\n{files}"
