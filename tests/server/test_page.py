"""The page: its files and their policy, and the page in a real browser that speaks the WebDriver protocol."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import quire.server
from tests.server.conftest import KEY
from tests.server.process import PATIENCE_S, ServerProcess, running

FOLDER = Path(quire.server.__file__).parent / "page"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def test_the_page_needs_no_key_and_its_files_come_with_a_strict_policy(narrow_server: ServerProcess) -> None:
    names = sorted(file.name for file in FOLDER.iterdir())
    for path in ("/", *(f"/page/{name}" for name in names)):
        answer = httpx.get(narrow_server.url + path, timeout=PATIENCE_S)
        assert answer.status_code == 200
        kind = {"css": "text/css", "js": "text/javascript"}.get(path.rpartition(".")[2], "text/html")
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    for path in ("/page/nothing.js", "/page/..%2Fapp.py", "/page/a/b.js"):
        assert httpx.get(narrow_server.url + path, timeout=PATIENCE_S).status_code in (401, 404)
    assert httpx.get(f"{narrow_server.url}/kv/map", timeout=PATIENCE_S).status_code == 401


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_a_file_of_the_page_is_short_and_names_no_other_host(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert not re.search(r"https?:|//[a-z0-9]+\.[a-z]", text)
    # Text of the model becomes text nodes only.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|<script>|\son\w+=\"", text)


class Browser:
    """A page in a headless browser, driven over WebDriver."""

    def __init__(self, driver: str, profile: Path) -> None:
        options = {"args": [*FLAGS, *QUIET, f"--user-data-dir={profile}", "--window-size=1200,800"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL"}}
        body = {"capabilities": {"alwaysMatch": wanted}}
        made = httpx.post(f"{driver}/session", json=body, timeout=PATIENCE_S).json()["value"]
        self._at = f"{driver}/session/{made['sessionId']}"

    def post(self, path: str, **body: Any) -> Any:
        answer = httpx.post(self._at + path, json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def run(self, script: str) -> Any:
        return self.post("/execute/sync", script=script, args=[])

    def wait(self, script: str) -> Any:
        """Return the first true value of a script."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)
        return value

    def close(self) -> None:
        httpx.delete(self._at, timeout=PATIENCE_S)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = shutil.which("chromedriver")
    if program is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        pytest.skip("no chromium with chromedriver is installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([program, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/status", timeout=1)
                    break
                except httpx.TransportError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            opened = Browser(f"http://127.0.0.1:{port}", tmp_path / "profile")
            yield opened
            opened.close()
        finally:
            driver.kill()


@pytest.mark.slow
def test_a_conversation_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    with running(Path("bundled"), tmp_path / "log", "--num-kv-blocks", "500", key=KEY) as server:
        browser.post("/url", url=server.url)
        # The page asks for the key, twice where it is wrong.
        for key in ("wrong", KEY):
            browser.wait("document.getElementById('ask-key').open")
            browser.run(
                f"document.getElementById('key').value = '{key}'; document.querySelector('dialog button').click()"
            )
        browser.wait("document.getElementById('facts').textContent.includes('context of')")
        browser.wait("document.getElementById('counts').textContent.includes('500 free')")
        send = "document.getElementById('input').value = {!r}; document.getElementById('form').requestSubmit()"
        browser.run("document.getElementById('max_tokens').value = 24; document.getElementById('logprobs').click()")
        browser.run(send.format("Tell me about **the sea** <img src=x>"))
        done = "document.querySelectorAll('.note').length === 1 && document.querySelector('.message.assistant .text')"
        assert browser.wait(f"({done}).textContent")
        # What was said is text, and the blocks that the answer left are on the map.
        assert browser.run("return document.querySelectorAll('#talk img').length") == 0
        browser.wait("/[1-9][0-9]* idle/.test(document.getElementById('counts').textContent)")
        press = "[...document.querySelectorAll('.assistant button')].find((each) => each.textContent === '{}').click()"
        browser.run(press.format("Tokens"))
        assert "%" in browser.wait("document.querySelector('.tokens span').title")
        # A second answer is a branch, and says how much of its prompt was shared.
        browser.run(press.format("Regenerate"))
        note = browser.wait("[...document.querySelectorAll('.note')].map((each) => each.textContent).find(Boolean)")
        found = re.search(r"branch: (\d+) of (\d+) prompt tokens shared", note)
        assert found
        assert int(found[1]) == int(found[2]) - 1
        assert browser.run("return document.querySelector('.assistant .tools').textContent").startswith(
            "\u20392/2\u203a"
        )
        # No control is without a name.
        controls = "[...document.querySelectorAll('input, textarea, select, button, canvas')]"
        is_named = "each.labels?.length || each.textContent.trim() || each.getAttribute('aria-label')"
        nameless = f"return {controls}.filter((each) => !({is_named})).map((each) => each.outerHTML)"
        assert browser.run(nameless) == []
        # A reload keeps the conversation.
        browser.post("/refresh")
        browser.wait("document.querySelectorAll('.message').length === 2")
        asked = [entry["message"] for entry in browser.post("/se/log", type="performance")]
        urls = {url for entry in asked for url in re.findall(r'"url":"((?:https?|wss?):[^"]*)"', entry)}
        assert f"{server.url}/kv/map" in urls
        assert {url for url in urls if not url.startswith(server.url)} == set()
