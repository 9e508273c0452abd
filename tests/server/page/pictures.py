"""Take the README's picture of the page: `python -m tests.server.page_picture docs/images/page.png`.

Needs chromium and chromedriver. The bundled model answers two questions; then requests fill its KV cache.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

from tests.server.page.browser import SEND, browsing
from tests.server.process import running

QUESTIONS = ("What is the opposite of hot?", "What is Quire?")
DONE = "document.getElementById('send').textContent === 'Send' && document.querySelectorAll('.note').length >= {}"


def main(path: str) -> int:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--num-kv-blocks", "300")
        with (
            running(Path("bundled"), Path(folder, "log"), *flags) as server,
            browsing(Path(folder, "profile")) as browser,
        ):
            browser.post("/url", url=server.url)
            browser.show_as(is_phone=False, is_dark=False)
            browser.wait("/[0-9] free/.test(document.getElementById('counts').textContent)")
            for number, question in enumerate(QUESTIONS, 1):
                browser.run(SEND.format(question))
                browser.wait(DONE.format(number))
            browser.wait("!document.body.textContent.includes('Nothing is published yet')")
            browser.click("Fill the memory")
            browser.wait("/^[2-9][0-9]+ used|^1[0-9][0-9] used/.test(document.getElementById('counts').textContent)")
            shot = browser.post("/goog/cdp/execute", cmd="Page.captureScreenshot", params={"format": "png"})
            Path(path).write_bytes(base64.b64decode(shot["data"]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
