"""Every block of code in README and docs is run: Python, requests by curl, and commands that need no server of theirs.

A block that cannot be run here has a comment on the line before it: `<!-- not run: the reason -->`.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.docs.test_readme import INTERFACE, OFFLINE

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ADDRESS = "http://127.0.0.1:8000"
NOT_RUN = "<!-- not run: "
# Commands that end by themselves and need nothing but the bundled model.
ENDING = ("generate", "chat", "plan", "simulate", "inspect", "quantize", "bench", "replay", "doctor")


class Block(NamedTuple):
    """A block of code.

    Args:
        page: name of its page.
        language: language behind the fence, "" for none.
        text: content.
        is_run: False where a comment says why it cannot be.
    """

    page: str
    language: str
    text: str
    is_run: bool


def blocks() -> Iterator[Block]:
    fence = re.compile(r"^([^\n]*)\n```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    for page in PAGES:
        for before, language, text in fence.findall(page.read_text(encoding="utf-8")):
            yield Block(str(page.relative_to(ROOT)), language, text, not before.startswith(NOT_RUN))


def commands(program: str) -> Iterator[tuple[str, str]]:
    """Yield the pages and the commands of a program in all blocks that can be run, of several lines or of one."""
    for block in blocks():
        if not block.is_run or block.language not in ("", "sh", "console"):
            continue
        text = block.text.replace("\\\n", " ")
        for match in re.finditer(rf"^(?:\$ )?((?:\S*/)?{program} )", text, re.MULTILINE):
            yield block.page, _whole(text[match.start(1) :])


def _whole(text: str) -> str:
    """Return the first lines of a text that are a whole command: quotes may span lines."""
    lines = text.splitlines()
    for count in range(1, len(lines) + 1):
        try:
            shlex.split("\n".join(lines[:count]), comments=True)
        except ValueError:
            continue
        return "\n".join(lines[:count])
    raise AssertionError(f"no whole command: {text}")


PYTHON = [block for block in blocks() if block.language == "python"]
FURTHER = [block for block in PYTHON if block.is_run and block.text not in (*OFFLINE, *INTERFACE)]


@pytest.mark.slow
@pytest.mark.parametrize("block", FURTHER, ids=lambda block: block.page)
def test_a_python_block_runs(block: Block, server_address: str) -> None:
    code = block.text.replace(ADDRESS, server_address)
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "command"), [*commands("curl")])
def test_a_request_is_answered(page: str, command: str, server_address: str) -> None:
    words = shlex.split(command)
    (url,) = (word for word in words if word.startswith("http"))
    assert url.startswith(ADDRESS), page
    given = {flag: words[idx + 1] for idx, flag in enumerate(words) if flag in ("-H", "-d")}
    url = url.replace(ADDRESS, server_address)
    if "-d" in given:
        headers = dict([given.get("-H", "Content-Type: application/json").split(": ", 1)])
        answer = httpx.post(url, content=given["-d"], headers=headers, timeout=60)
    else:
        answer = httpx.get(url, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.text


def test_a_request_with_a_body_has_its_content_type() -> None:
    bodies = 0
    for block in blocks():
        text = block.text.replace("\\\n", " ")
        for match in re.finditer(r"^(?:\$ )?(curl )", text, re.MULTILINE):
            words = shlex.split(_whole(text[match.start(1) :]))
            bodies += "-d" in words
            assert "-d" not in words or "Content-Type: application/json" in words, (block.page, words)
    assert bodies > 10


def ending_commands() -> dict[str, list[list[str]]]:
    """Return the commands that end by themselves, by page and in their order: one may need the file of another."""
    found: dict[str, list[list[str]]] = {}
    for page, command in commands("quire"):
        words = shlex.split(command, comments=True)[1:]
        if words and words[0] in ENDING and words[:2] != ["bench", "serve"]:
            found.setdefault(page, []).append(words)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("page", "lines"), [*ending_commands().items()])
def test_the_commands_of_a_page_end_well(page: str, lines: list[list[str]], tmp_path: Path) -> None:
    prepare(tmp_path, page)
    for words in lines:
        redirected = words.index(">") if ">" in words else len(words)
        done = subprocess.run(
            [sys.executable, "-m", "quire", *words[:redirected]],
            input="What colour is a lemon?\n",
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=300,
        )
        # The plan of a budget that is too small for the longest sequence ends with 1.
        assert done.returncode in ((0, 1) if words[0] == "plan" else (0,)), (page, words, done.stderr)


def prepare(folder: Path, page: str) -> None:
    """Put the files into a folder that the commands of a page read."""
    bundled = ROOT / "src" / "quire" / "models" / "bundled"
    shutil.copytree(bundled, folder / "path" / "to" / "folder")
    for model in ("gemma-3-27b", "llama-3.1-8b"):
        (folder / model).mkdir()
        shutil.copy(bundled / "config.json", folder / model)
    if page != "docs/checkpoints.md":  # whose commands make it
        write = [sys.executable, "-m", "quire", "quantize", "bundled", "model-Q4_K_M.gguf", "--to", "q8_0"]
        subprocess.run(write, check=True, capture_output=True, cwd=folder)
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    (folder / "schema.json").write_text(json.dumps({**schema, "additionalProperties": False}), encoding="utf-8")


def test_a_block_that_is_not_run_has_a_reason() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    with_reason = re.findall(r"^<!-- not run: [^\n]{10,} -->\n```", text, re.MULTILINE)
    assert text.count(NOT_RUN) == len(with_reason)
