"""What the documents show works: Python examples run, commands and options exist, links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from quire.cli.main import build_parser, parse_args

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
DEFAULT_ADDRESS = "http://127.0.0.1:8000"


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's code blocks in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


OFFLINE = [block for block in blocks(README, "python") if "LLM(" in block]
PAGES_RUN = ("decoding.md", "from-vllm.md", "python.md", "serving.md")
INTERFACE = [block for page in PAGES_RUN for block in blocks(ROOT / "docs" / page, "python") if "OpenAI(" not in block]
CLIENTS = [
    block for page in (README, ROOT / "docs" / "agents.md") for block in blocks(page, "python") if "OpenAI(" in block
]
# The output that a page shows directly after an example.
PRINTED = {
    code: output
    for page in PAGES
    for code, output in re.findall(
        r"^```python\n(.*?)^```\n\n^```text\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
}
# Requests that a page shows with the choice of the answer.
ANSWERED = re.findall(
    r"^```console\n([^`]*)^```\n\n(?:[^\n]*\n\n)?^```json\n([^`]*)^```$",
    (ROOT / "docs" / "serving.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
# Runs examples one after the other, each in a namespace of its own; ends at the first one that fails.
RUN_ALL = """
import contextlib, io, json, sys
outputs = []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})
    outputs.append(output.getvalue())
json.dump(outputs, sys.stdout)
"""


@pytest.fixture(scope="module")
def outputs() -> dict[str, str]:
    """The output of each example. They share a process, since most of an example's time is the start of one."""
    codes = [*OFFLINE, *INTERFACE]
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL], input=json.dumps(codes), capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(codes, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("code", OFFLINE)
def test_the_offline_examples_run(code: str, outputs: dict[str, str]) -> None:
    assert outputs[code].strip()
    if "A small fox" in code:
        assert outputs[code].startswith("Once upon a time ->")
        assert "A small fox ->" in outputs[code]


@pytest.mark.parametrize("code", INTERFACE)
def test_the_examples_of_decoding_and_of_the_interface_run(code: str, outputs: dict[str, str]) -> None:
    output = outputs[code]
    assert output.strip()
    assert "Majority" not in code or "the others agree" in output
    assert "AsyncLLM" not in code or ("abort" in output and 'write swap_space="4GiB"' in output)
    assert output == PRINTED.get(code, output)


@pytest.mark.parametrize("code", CLIENTS)
def test_a_client_example_runs_against_a_server(code: str, server_address: str) -> None:
    assert DEFAULT_ADDRESS in code
    there = code.replace(DEFAULT_ADDRESS, server_address)
    done = subprocess.run([sys.executable, "-c", there], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip()
    assert done.stdout == PRINTED.get(code, done.stdout)


def sent(command: str, server_address: str) -> httpx.Response:
    """Send the request of a command line, and return the answer."""
    words = shlex.split(command)
    assert words[:2] == ["$", "curl"]
    assert words[2].startswith(DEFAULT_ADDRESS)
    header, body = (words[words.index(flag) + 1] for flag in ("-H", "-d"))
    url = words[2].replace(DEFAULT_ADDRESS, server_address)
    answer = httpx.post(url, content=body, headers=dict([header.split(": ")]), timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("command", blocks(ROOT / "docs" / "protocols.md", "console"))
def test_a_request_of_each_protocol_is_answered(command: str, server_address: str) -> None:
    assert sent(command, server_address).content


def test_requests_with_tools_and_reasoning_have_the_answers_that_are_shown(server_address: str) -> None:
    assert len(ANSWERED) == 2
    for command, shown in ANSWERED:
        (choice,) = sent(command, server_address).json()["choices"]
        expected = json.loads(shown)
        for call in (*choice["message"].get("tool_calls", ()), *expected["message"].get("tool_calls", ())):
            assert call.pop("id").startswith("call_")
        assert choice == expected


def quire_commands() -> list[str]:
    """Return every `quire ...` command of the pages' shell blocks, of one line or of several."""
    shells = (block.replace("\\\n", " ") for page in PAGES for block in blocks(page, "sh"))
    lines = (line for shell in shells for line in shell.splitlines())
    return [line.partition("quire ")[2] for line in lines if line.startswith(("quire ", ".venv/bin/quire "))]


@pytest.mark.parametrize("line", quire_commands())
def test_a_shown_command_is_understood(line: str) -> None:
    parse_args(shlex.split(line, comments=True))


def test_every_command_is_in_the_table_of_the_readme() -> None:
    shown = set(re.findall(r"^\| `quire (\w+)` \|", README.read_text(encoding="utf-8"), re.MULTILINE))
    listed = set(re.findall(r"^    (\w+) ", build_parser().format_help(), re.MULTILINE))
    assert shown == listed


def test_every_named_option_exists() -> None:
    known = subprocess.run(
        [sys.executable, "-m", "quire", "serve", "--help"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    rows = re.findall(r"^\| (`--.*?) \|", README.read_text(encoding="utf-8"), re.MULTILINE)
    options = [option for row in rows for option in re.findall(r"`(--[\w-]+)`", row)]
    assert len(options) > 5
    assert [option for option in options if option not in known] == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    missing = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            missing.append(link)
    assert missing == []


@pytest.mark.parametrize("folder", ["decisions", "lab"])
def test_an_index_lists_every_page_of_its_folder(folder: str) -> None:
    index = ROOT / "docs" / folder / "README.md"
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", index.read_text(encoding="utf-8")))
    assert listed == {page.name for page in index.parent.glob("*.md")} - {"README.md"}


def test_the_makefile_has_the_targets_that_the_documents_name() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(encoding="utf-8"), re.M)
    }
    assert {"run", "test"} <= named
    assert [name for name in sorted(named) if f"\n{name}:" not in makefile] == []
