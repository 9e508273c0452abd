"""Take the pictures of the page for the docs: `python -m tests.server.page.pictures docs/images`.

Needs chromium and chromedriver. The bundled model answers two questions, while requests fill its KV cache; the
conversation with Markdown and formulas is one that is imported, as the bundled model knows no mathematics.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.server.page.browser import SEND, Browser, browsing
from tests.server.process import running

QUESTIONS = ("What is the opposite of hot?", "What is Quire?")
DONE = "document.getElementById('send').textContent === 'Send' && document.querySelectorAll('.note').length >= {}"
TITLES = ("Three names for a kite", "Why is the sea salty?", "A letter to the harbour office")
ASKED = "How do I solve a quadratic equation, by hand and in Python?"
ANSWER = r"""The roots of $ax^2 + bx + c = 0$ with $a \neq 0$ are

$$x_{1,2} = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

1. Compute the **discriminant** $D = b^2 - 4ac$.
2. Its sign tells how many real roots there are:

| $D$ | real roots | example |
|:-:|---|---|
| $> 0$ | two | $x^2 - 1 = 0$ |
| $= 0$ | one, twice | $x^2 = 0$ |
| $< 0$ | none | $x^2 + 1 = 0$ |

```python
def roots(a: float, b: float, c: float) -> tuple[complex, complex]:
    root = (b * b - 4 * a * c) ** 0.5  # complex if negative
    return (-b + root) / (2 * a), (-b - root) / (2 * a)
```

- [x] checked for $D > 0$, $D = 0$ and $D < 0$
- [ ] see [the derivation](https://en.wikipedia.org/wiki/Quadratic_formula)
"""


def conversations() -> str:
    """Return a file of conversations, the one with formulas first."""
    asked: dict[str, object] = {"id": 0, "parent": None, "role": "user", "content": ASKED}
    answer = {"id": 1, "parent": 0, "role": "assistant", "content": ANSWER, "end": "stop"}
    others = [{"title": title, "messages": [{**asked, "content": title}], "leaf": 0} for title in TITLES]
    return json.dumps({"conversations": [{"title": ASKED, "messages": [asked, answer], "leaf": 1}, *others]})


def take_chats(browser: Browser, folder: Path, file: Path) -> None:
    """Take the picture of a conversation with formulas, on a desktop in the dark and on a phone."""
    file.write_text(conversations())
    browser.choose_file("#import", file)
    browser.wait("document.querySelectorAll('.message').length === 2")
    browser.run("document.getElementById('library-note').textContent = ''")
    for name, size, is_phone in (("page-chat.png", (1280, 860), False), ("page-phone.png", (390, 844), True)):
        browser.look(*size, is_phone=is_phone, is_dark=not is_phone)
        browser.run("document.getElementById('talk').scrollTop = 0; document.activeElement.blur()")
        time.sleep(0.5)  # for the map's next frame
        (folder / name).write_bytes(browser.picture())


def main(path: str) -> int:
    """Write the pictures into a folder."""
    with tempfile.TemporaryDirectory() as scratch:
        flags = ("--num-kv-blocks", "300")
        with (
            running(Path("bundled"), Path(scratch, "log"), *flags) as server,
            browsing(Path(scratch, "profile")) as browser,
        ):
            browser.look(1280, 860)
            browser.open_page(server.url)
            for number, question in enumerate(QUESTIONS, 1):
                browser.run(SEND.format(question))
                browser.wait(DONE.format(number))
            browser.wait("!document.body.textContent.includes('Nothing is published yet')")
            browser.click("Fill the memory")
            browser.wait("/^2[0-9][0-9] used/.test(document.getElementById('counts').textContent)")
            Path(path, "page.png").write_bytes(browser.picture())
            browser.click("Stop filling")
            server.wait_until_idle()
            take_chats(browser, Path(path), Path(scratch, "conversations.json"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
