"""Pictures on the page: chosen, dropped and pasted, sent to a model that reads them, kept, and marked in the map."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.images.tiny_model import picture, save
from tests.server.conftest import KEY
from tests.server.page.browser import DONE, Browser
from tests.server.page.test_memory import SIZES
from tests.server.process import ServerProcess, running

pytestmark = pytest.mark.slow
THUMBS = "[...document.querySelectorAll('#attached img')]"
SHOWN = "[...document.querySelectorAll('.message img')]"
LOADED = "{}.filter((each) => each.naturalWidth).length === {}"
# Keeps the bodies of all requests.
RECORD = """
window.sent = [];
const before = window.fetch;
window.fetch = (path, options) => {
  if (options?.body) window.sent.push(JSON.parse(options.body));
  return before(path, options);
};
"""
# A file of (name, base64, type) in a transfer, as a drop or a paste has it.
HAND_OVER = """
const [event, name, data, type] = arguments, transfer = new DataTransfer();
const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
transfer.items.add(new File([bytes], name, { type }));
const options = { bubbles: true, cancelable: true };
const made = event === 'paste' ? new ClipboardEvent(event, { ...options, clipboardData: transfer })
  : new DragEvent(event, { ...options, dataTransfer: transfer });
document.getElementById('input').dispatchEvent(made);
return made.defaultPrevented;
"""


@pytest.fixture(scope="module")
def seeing(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:  # noqa: ARG001
    """A server of a tiny random model that reads images, for the browser only."""
    folder = save(tmp_path_factory.mktemp("models") / "vision")
    flags = ("--num-kv-blocks", "600", "--dtype", "float32")
    with running(folder, tmp_path_factory.mktemp("logs") / "seeing.log", *flags) as server:
        yield server


@pytest.fixture
def page(browser: Browser, seeing: ServerProcess) -> Browser:
    """The page of that server, with nothing left over from the test before."""
    seeing.post("/reset_prefix_cache", {})
    browser.show_as(is_phone=False, is_dark=False)
    open_seeing(browser, seeing)
    return browser


def open_seeing(browser: Browser, seeing: ServerProcess) -> None:
    browser.open_page(seeing.url)
    browser.run(RECORD)
    browser.run("document.getElementById('max_tokens').value = 8; document.getElementById('temperature').value = 0")


def choose(browser: Browser, folder: Path, name: str, width: int, height: int, seed: int) -> None:
    file = folder / name
    file.write_bytes(picture(width, height, seed))
    num_before = browser.run(f"return {THUMBS}.length")
    browser.choose_file("#picture", file)
    browser.wait(LOADED.format(THUMBS, num_before + 1))


def hand_over(browser: Browser, event: str, name: str, data: bytes, kind: str = "image/png") -> bool:
    return bool(browser.run(HAND_OVER, event, name, base64.b64encode(data).decode(), kind))


def send(browser: Browser, text: str) -> Any:
    """Send a message, and return the messages of the request after the end of the answer."""
    browser.run("window.sent.length = 0; document.getElementById('input').focus()")
    browser.press(*text, "Enter")
    browser.wait("window.sent.length > 0")
    browser.wait(DONE)
    return browser.run("return window.sent.at(-1).messages")


def kinds(message: dict[str, Any]) -> list[str]:
    return [part["type"] for part in message["content"]]


def test_pictures_by_button_drop_and_paste_are_sent_and_kept(
    page: Browser, seeing: ServerProcess, tmp_path: Path
) -> None:
    choose(page, tmp_path, "one.png", 64, 48, 0)
    assert hand_over(page, "drop", "two.png", picture(32, 56, 1))
    page.wait(LOADED.format(THUMBS, 2))
    assert hand_over(page, "paste", "image.png", picture(40, 40, 2))
    page.wait(LOADED.format(THUMBS, 3))
    assert page.run(f"return {THUMBS}.map((each) => each.alt)") == [
        "Picture one.png",
        "Picture two.png",
        "Picture image.png",
    ]
    # By keyboard one is removed; the focus goes to the next one.
    page.run("document.querySelector('[aria-label=\"Remove Picture two.png\"]').focus()")
    page.press("Enter")
    page.wait(f"{THUMBS}.length === 2")
    assert page.run("return document.activeElement.ariaLabel") == "Remove Picture image.png"
    (message,) = send(page, "What are these?")
    assert kinds(message) == ["image_url", "image_url", "text"]
    assert message["content"][2]["text"] == "What are these?"
    assert not page.run("return document.querySelector('.end.bad')?.textContent")
    assert page.run("return document.getElementById('attached').hidden")
    note = page.run("return document.querySelector('.assistant .note').textContent")
    read = re.match(r"(\d+) tokens read", note)
    assert read
    assert int(read[1]) > 48 + 25, "the tokens of both pictures"
    # The conversation outlives a reload, and so does what is not sent yet.
    choose(page, tmp_path, "three.png", 24, 24, 3)
    page.post("/refresh")
    page.wait(LOADED.format(SHOWN, 2))
    page.wait(LOADED.format(THUMBS, 1))
    page.run(RECORD)
    page.run("document.getElementById('max_tokens').value = 8")
    # A second turn sends all pictures again, the same bytes, which are found in the cache.
    first, _, third = send(page, "And this?")
    assert first == message
    assert kinds(third) == ["image_url", "text"]
    page.wait("document.querySelectorAll('.assistant .note').length === 2")
    note = page.run("return [...document.querySelectorAll('.assistant .note')].at(-1).textContent")
    cached = re.search(r"(\d+) from cache", note)
    assert cached
    assert int(cached[1]) > 48
    # Another answer, and a message without one of its pictures, as branches.
    page.run("window.sent.length = 0")
    page.click("Regenerate")
    page.wait(f"window.sent.length === 1 && {DONE}")
    assert page.run("return window.sent[0].messages") == [message]
    page.click("Edit")
    page.click("✕", "document.querySelector('.user')")
    page.wait("document.querySelectorAll('.user .picture').length === 1")
    page.run("window.sent.length = 0")
    page.click("Send", "document.querySelector('.user')")
    page.wait(f"window.sent.length === 1 && {DONE}")
    assert page.run("return window.sent[0].messages") == [{"role": "user", "content": message["content"][1:]}]
    assert "2/2" in page.run("return document.querySelector('.user .tools').textContent")
    seeing.wait_until_idle()


def test_a_picture_alone_is_a_message(page: Browser, tmp_path: Path) -> None:
    choose(page, tmp_path, "one.png", 24, 24, 0)
    (message,) = send(page, "")
    assert kinds(message) == ["image_url"]
    assert not page.run("return document.querySelector('.user .text').checkVisibility()")


def test_a_large_picture_is_scaled_and_what_is_none_is_told(page: Browser) -> None:
    script = """
    const canvas = Object.assign(document.createElement('canvas'), { width: 3200, height: 400 });
    canvas.getContext('2d').fillRect(9, 9, 9, 9);
    return canvas.toDataURL('image/png').split(',')[1];
    """
    assert hand_over(page, "drop", "wide.png", base64.b64decode(page.run(script)))
    page.wait(LOADED.format(THUMBS, 1))
    assert page.run(f"return [{THUMBS}[0].naturalWidth, {THUMBS}[0].naturalHeight]") == [1600, 200]
    # What is transparent is white.
    assert (
        page.run(
            f"const pen = document.createElement('canvas').getContext('2d'); pen.drawImage({THUMBS}[0], 0, 0);"
            "return [...pen.getImageData(40, 40, 1, 1).data]"
        )
        == [255] * 4
    )
    toast = "document.getElementById('toast').textContent"
    hand_over(page, "drop", "broken.png", b"no picture")
    page.wait(f"{toast}.startsWith('broken.png is no picture that this browser can read.')")
    assert hand_over(page, "drop", "a.txt", b"text", "text/plain"), "else the browser leaves the page for the file"
    page.wait(f"{toast}.startsWith('Only pictures can be dropped here.')")
    assert page.run(f"return {THUMBS}.length") == 1


def test_what_the_server_refuses_stays_in_the_composer(page: Browser, tmp_path: Path) -> None:
    choose(page, tmp_path, "thin.png", 1, 300, 0)
    send(page, "What is this?")
    refusal = page.run("return document.querySelector('.end.bad span').textContent")
    assert "messages[0].content[0]" in refusal
    assert "200" in refusal
    assert page.run("return document.getElementById('input').value") == "What is this?"
    assert page.run(f"return {THUMBS}.length") == 1
    # It stays there after a reload, and what is sent in its place does not carry it along.
    page.post("/refresh")
    page.wait(LOADED.format(THUMBS, 1))
    page.run(RECORD)
    page.run("document.getElementById('max_tokens').value = 8")
    page.run("document.querySelector('#attached button').click()")
    assert send(page, "") == [{"role": "user", "content": "What is this?"}]
    page.wait("document.querySelectorAll('.message').length === 2 && document.querySelector('.assistant .note')")
    assert "2/2" in page.run("return document.querySelector('.user .tools').textContent")
    assert page.run("return document.getElementById('input').value") == ""


def test_without_room_nothing_that_was_said_is_lost(page: Browser, tmp_path: Path) -> None:
    page.run("IDBObjectStore.prototype.put = () => { throw new DOMException('', 'QuotaExceededError'); }")
    choose(page, tmp_path, "one.png", 24, 24, 0)
    page.wait("document.getElementById('toast').textContent.startsWith('The browser has no room left: the picture')")
    assert kinds(send(page, "What is this?")[0]) == ["image_url", "text"]
    answer = page.run("return document.querySelector('.assistant .text').textContent")
    page.post("/refresh")
    page.wait("document.querySelectorAll('.message').length === 2")
    page.wait("document.querySelector('.user .picture').textContent === 'Picture one.png, not kept in this browser'")
    assert page.run("return document.querySelector('.user .text').textContent") == "What is this?"
    assert page.run("return document.querySelector('.assistant .text').textContent") == answer
    # The conversation cannot go on with it, and says how it can go on.
    page.click("Regenerate")
    page.wait("document.querySelector('.end.bad')?.textContent.includes('Edit its message to go on without it.')")


def test_pictures_are_exported_and_imported(page: Browser, seeing: ServerProcess, tmp_path: Path) -> None:
    choose(page, tmp_path, "one.png", 24, 24, 0)
    send(page, "What is this?")
    script = """
    const [storage, pictures] = await Promise.all(
      ['storage', 'pictures'].map((name) => import(`${arguments[0]}/page/chat/${name}.js`)));
    return storage.toFile(await pictures.pack(storage.load()));
    """
    text = page.run(f"return (async () => {{ {script} }})(...arguments)".replace("arguments[0]", repr(seeing.url)))
    (message, _) = json.loads(text)["conversations"][0]["messages"]
    (kept,) = message["pictures"]
    assert kept["data"].startswith("data:image/png;base64,")
    file = tmp_path / "conversations.json"
    # Nothing of a file is loaded from elsewhere, or is another kind of data.
    others = [{**kept, "data": data} for data in ("https://example.org/x.png", "data:image/svg+xml;base64,AAAA", 5)]
    message["pictures"] = [kept, *others, {"data": kept["data"]}]
    file.write_text(json.dumps({"conversations": [{"title": "Read", "messages": [message], "leaf": message["id"]}]}))
    page.choose_file("#import", file)
    page.wait(LOADED.format(SHOWN, 2))
    page.wait("document.querySelectorAll('.user .picture .note').length === 3")
    for bad in (5, "ab", [None]):
        message["pictures"] = bad
        file.write_text(json.dumps({"messages": [message]}))
        page.choose_file("#import", file)
        page.wait("document.getElementById('library-note').textContent.startsWith('Conversation 1')")
        page.run("document.getElementById('library-note').textContent = ''")


def test_pictures_without_a_message_are_deleted_after_a_day(
    page: Browser, seeing: ServerProcess, tmp_path: Path
) -> None:
    choose(page, tmp_path, "one.png", 24, 24, 0)
    send(page, "What is this?")
    choose(page, tmp_path, "two.png", 24, 24, 1)
    keys = """return new Promise((resolve) => {
      indexedDB.open('quire', 1).onsuccess = ({ target: { result: database } }) => {
        const asked = database.transaction('pictures').objectStore('pictures').getAllKeys();
        asked.onsuccess = () => { database.close(); resolve(asked.result); };
      };
    });"""
    used = page.run("return Object.values(localStorage).join()")
    both = page.run(keys)
    assert len(both) >= 2
    sweep = f"""return import('{seeing.url}/page/chat/pictures.js').then(async ({{ sweep }}) => {{
      const now = Date.now;
      await sweep(new Set(arguments[0]));
      Date.now = () => now() + arguments[1];
      await sweep(new Set(arguments[0]));
      Date.now = now;
    }});"""
    kept = [key for key in both if key in used]
    assert len(kept) == 1
    page.run(sweep, kept, 3_600_000)
    assert page.run(keys) == both
    page.run(sweep, kept, 25 * 3_600_000)
    assert page.run(keys) == kept


def test_blocks_with_rows_of_a_picture_are_marked_in_the_map(
    page: Browser, seeing: ServerProcess, tmp_path: Path
) -> None:
    choose(page, tmp_path, "one.png", 64, 48, 0)
    send(page, "What is this?")
    blocks = [seeing.http.get("/kv/block", params={"pool": 0, "block": block}).json() for block in range(1, 601)]
    marked = {each["block"]: each["media_tokens"] for each in blocks if each["media_tokens"]}
    # 48 tokens behind the two of the beginning.
    assert sorted(marked.values()) == [2, 14, 16, 16]
    page.wait("document.getElementById('counts').textContent.startsWith('0 used \u00b7 ')")
    page.run("document.getElementById('map').focus()")
    at, told = 0, []
    for block in sorted(marked):
        page.press(*["Right"] * (block - at))
        at = block
        told.append(page.run("return document.getElementById('announce-memory').textContent"))
    assert told == [f"device block {block}: idle, has rows of an image" for block in sorted(marked)]
    page.press("Enter")
    page.wait(f"document.getElementById('detail').textContent.includes('stand for images: {marked[at]}')")


def test_a_model_of_texts_is_offered_no_pictures(browser: Browser, bundled: ServerProcess) -> None:
    browser.show_as(is_phone=False, is_dark=False)
    browser.open_page(bundled.url, key=KEY)
    browser.wait("document.getElementById('facts').textContent.includes('context of')")
    assert not browser.run("return document.getElementById('picture-box').checkVisibility()")
    assert not hand_over(browser, "paste", "image.png", picture(8, 8, 0))
    assert browser.run(f"return {THUMBS}.length") == 0


@pytest.mark.parametrize("name", SIZES)
def test_pictures_have_room_names_and_contrast(
    browser: Browser, seeing: ServerProcess, tmp_path: Path, name: str
) -> None:
    browser.look(*SIZES[name], is_phone="phone" in name)
    open_seeing(browser, seeing)
    for seed in range(4):
        choose(browser, tmp_path, f"a picture with a very long name {seed}.png", 200, 8 + 96 * seed, seed)
    send(browser, "What are these?")
    for seed in range(4):
        choose(browser, tmp_path, f"{seed}.png", 8 + 96 * seed, 200, seed)
    for is_dark in (False, True):
        browser.look(*SIZES[name], is_phone="phone" in name, is_dark=is_dark)
        for check in ("overflowing()", "lowContrast()", "nameless()", "misnamed()", "liveRegions()"):
            assert browser.check(check) == [], (check, is_dark)
    room = browser.run("return document.getElementById('talk').getBoundingClientRect().height")
    assert room >= 0.3 * SIZES[name][1]
