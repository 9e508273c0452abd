"""A page in a headless browser, driven over the WebDriver protocol."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.process import PATIENCE_S

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
SEND = "document.getElementById('input').value = {!r}; document.getElementById('form').requestSubmit()"
DONE = "document.getElementById('send').textContent === 'Send' && document.querySelector('.assistant .note, .end')"
CHECKS = Path(__file__).with_name("checks.js")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
# Keys of the WebDriver protocol.
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "Left": "\ue012", "Right": "\ue014", "Down": "\ue015"}


def missing_browser() -> str | None:
    """Return why there is no browser, None where there is one."""
    if shutil.which("chromedriver") is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        return "no chromium with chromedriver is installed"
    return None


class Browser:
    """A page in a headless browser.

    Args:
        driver: address of the driver.
        profile: folder of the browser's data.
    """

    def __init__(self, driver: str, profile: Path) -> None:
        options = {"args": [*FLAGS, *QUIET, f"--user-data-dir={profile}", "--window-size=1200,800"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"performance": "ALL"}}
        body = {"capabilities": {"alwaysMatch": wanted}}
        made = httpx.post(f"{driver}/session", json=body, timeout=PATIENCE_S).json()["value"]
        self._at = f"{driver}/session/{made['sessionId']}"

    def post(self, path: str, **body: Any) -> Any:
        """Send a command of the protocol and return its value."""
        answer = httpx.post(self._at + path, json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def show_as(self, *, is_phone: bool, is_dark: bool) -> None:
        """Make the screen a phone's with touch, or a desktop's, in light or dark colours."""
        width, height = (390, 844) if is_phone else (1280, 860)
        self.look(width, height, is_phone=is_phone, is_dark=is_dark)

    def run(self, script: str, *values: Any) -> Any:
        """Run a script with `arguments`, and return its result, or that of the promise that it returns."""
        return self.post("/execute/sync", script=script, args=list(values))

    def open_page(self, url: str, *, key: str | None = None) -> None:
        """Open the page of a server anew, with an empty storage."""
        self.post("/url", url=url)
        self.run(
            "localStorage.clear(); sessionStorage.clear(); sessionStorage.setItem('quire.key', arguments[0])", key or ""
        )
        self.post("/refresh")
        self.wait("/[0-9] free/.test(document.getElementById('counts').textContent)")

    def ask(self, text: str) -> None:
        """Send a message and wait for the end of the answer."""
        self.run(SEND.format(text))
        self.wait(DONE)

    def look(self, width: int, height: int, *, is_phone: bool = False, is_dark: bool = False) -> None:
        """Make the screen one of a size, a phone's with touch or a desktop's, in light or dark colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if is_phone else 1, "mobile": is_phone}
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        for command, params in (
            ("Emulation.setDeviceMetricsOverride", size),
            ("Emulation.setTouchEmulationEnabled", {"enabled": is_phone}),
            # Without a window, no page has the focus, and none gets its events.
            ("Emulation.setFocusEmulationEnabled", {"enabled": True}),
            ("Emulation.setEmulatedMedia", {"features": [scheme]}),
        ):
            self.post("/goog/cdp/execute", cmd=command, params=params)

    def new_tab(self) -> str:
        """Open a tab, go to it, and return its handle."""
        handle = str(self.post("/window/new", type="tab")["handle"])
        self.go_to(handle)
        return handle

    def go_to(self, handle: str) -> None:
        """Go to a tab."""
        self.post("/window", handle=handle)

    def tab(self) -> str:
        """Return the handle of the tab."""
        answer = httpx.get(f"{self._at}/window", timeout=PATIENCE_S)
        return str(answer.json()["value"])

    def tabs(self) -> list[str]:
        """Return the handles of all tabs."""
        return list(httpx.get(f"{self._at}/window/handles", timeout=PATIENCE_S).json()["value"])

    def close_tab(self) -> None:
        """Close the tab; another one has to be gone to."""
        httpx.delete(f"{self._at}/window", timeout=PATIENCE_S)

    def picture(self) -> bytes:
        """Return what is on the screen as a PNG file."""
        shot = self.post("/goog/cdp/execute", cmd="Page.captureScreenshot", params={"format": "png"})
        return base64.b64decode(shot["data"])

    def check(self, call: str, *values: Any) -> Any:
        """Return the result of a call of `checks.js`, to which `arguments` are known."""
        return self.run(f"{CHECKS.read_text()}\nreturn {call};", *values)

    def wait(self, script: str) -> Any:
        """Return the first true value of a script."""
        deadline = time.monotonic() + PATIENCE_S
        while not (value := self.run(f"return {script}")):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)
        return value

    def click(self, text: str, within: str = "document") -> None:
        """Click the first visible button with a text."""
        has_text = f"(each) => each.textContent.trim() === {text!r} && each.checkVisibility()"
        self.wait(f"[...{within}.querySelectorAll('button')].some({has_text})")
        self.run(f"[...{within}.querySelectorAll('button')].find({has_text}).click()")

    def press(self, *keys: str) -> None:
        """Press and release keys, one after another, where the focus is."""
        values = [KEYS.get(key, key) for key in keys]
        actions = [{"type": kind, "value": value} for value in values for kind in ("keyDown", "keyUp")]
        self.post("/actions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def choose_file(self, selector: str, path: Path) -> None:
        """Choose a file in an input of files."""
        found = self.post("/element", using="css selector", value=selector)
        self.post(f"/element/{found[ELEMENT]}/value", text=str(path))

    def close(self) -> None:
        """End the browser."""
        httpx.delete(self._at, timeout=PATIENCE_S)


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """Start a driver and a browser, and end both afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["chromedriver", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while True:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/status", timeout=1)
                    break
                except httpx.TransportError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            opened = Browser(f"http://127.0.0.1:{port}", profile)
            yield opened
            opened.close()
        finally:
            driver.kill()
