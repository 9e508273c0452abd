"""The page in a real browser: on a phone and a desktop, in light and dark, by keyboard."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import KEY
from tests.server.page.browser import DONE, SEND, Browser
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow


def test_a_conversation(browser: Browser, bundled: ServerProcess) -> None:
    browser.show_as(is_phone=False, is_dark=False)
    # The tests before have left blocks, a key and conversations.
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    assert httpx.post(f"{bundled.url}/reset_prefix_cache", headers=headers).status_code == 200
    browser.post("/url", url=bundled.url)
    browser.run("localStorage.clear(); sessionStorage.clear()")
    # What a browser asked for before belongs to the page that its makers let it start with.
    browser.post("/url", url="about:blank")
    browser.post("/se/log", type="performance")
    browser.post("/url", url=bundled.url)
    # The page asks for the key, twice where it is wrong.
    for key in ("wrong", KEY):
        browser.wait("document.getElementById('ask-key').open")
        browser.run(f"document.getElementById('key').value = '{key}'; document.querySelector('dialog button').click()")
    browser.wait("document.getElementById('facts').textContent.includes('context of')")
    browser.wait("document.getElementById('counts').textContent.includes('300 free')")
    browser.run("document.getElementById('max_tokens').value = 24")
    browser.ask("Tell me about **the sea** <img src=x>")
    # What was said is text, and the blocks that the answer left are on the map.
    assert browser.run("return document.querySelectorAll('#talk img').length") == 0
    browser.wait("/[1-9][0-9]* idle/.test(document.getElementById('counts').textContent)")
    # A second answer is a branch, and says how much of its prompt was shared.
    browser.click("Regenerate")
    note = browser.wait("[...document.querySelectorAll('.note')].map((each) => each.textContent).find(Boolean)")
    found = re.search(r"branch: (\d+) of (\d+) prompt tokens shared \((\d+) blocks?\)", note)
    assert found
    assert int(found[1]) == int(found[2]) - 1
    assert int(found[3]) == int(found[1]) // 16
    tools = "document.querySelector('.assistant .tools').textContent"
    assert browser.run(f"return {tools}").startswith("\u20392/2\u203a")
    # A reload keeps the conversation.
    browser.post("/refresh")
    browser.wait("document.querySelectorAll('.message').length === 2")
    asked = [entry["message"] for entry in browser.post("/se/log", type="performance")]
    urls = {url for entry in asked for url in re.findall(r'"url":"((?:https?|wss?):[^"]*)"', entry)}
    assert f"{bundled.url}/kv/map" in urls
    assert {url for url in urls if not url.startswith(bundled.url)} == set()


def test_samples_alternatives_and_files(browser: Browser, bundled: ServerProcess, tmp_path: Path) -> None:
    browser.show_as(is_phone=False, is_dark=False)
    browser.open_page(bundled.url, key=KEY)
    browser.run("document.getElementById('max_tokens').value = 60; document.getElementById('samples').value = 3")
    browser.run("document.getElementById('logprobs').click()")
    browser.ask("Once upon a time there was a fox and a crow. " * 5)
    # Three samples stand side by side, and say how many blocks they share.
    assert browser.run("return document.querySelectorAll('.samples .message').length") == 3
    note = browser.run("return document.querySelector('.samples .tools .note').textContent")
    found = re.search(r"3 samples.* (\d+) blocks? fewer than alone", note)
    assert found
    assert int(found[1]) >= 2 * 3
    browser.click("Use this")
    assert browser.run("return document.querySelector('.chosen .note').textContent").endswith("goes on")
    # By keyboard alone: a token, its alternatives, one of which forks there.
    browser.click("Tokens", "document.querySelector('.chosen')")
    tokens = browser.run("return [...document.querySelectorAll('.tokens span')].map((each) => each.textContent)")
    browser.run("document.querySelector('.tokens span').focus()")
    browser.press("Right", "Right", "Enter")
    rows = browser.run("return [...document.querySelectorAll('#alternatives button')].map((each) => each.ariaLabel)")
    assert len(rows) == 4
    assert all(re.fullmatch(r"Fork here with .+, [0-9.]+ %", row) for row in rows)
    assert browser.run("return document.activeElement.className") == "alternative"
    browser.press("Escape")
    assert browser.run("return document.getElementById('alternatives').hidden")
    assert browser.run("return document.activeElement.textContent") == tokens[2]
    browser.press("Enter", "Enter")
    browser.wait("document.querySelectorAll('.samples').length === 0")
    browser.wait(DONE)
    forked = browser.run("return document.querySelector('.assistant .text').textContent")
    begun, other = "".join(tokens[:2]), rows[0].removeprefix("Fork here with ").rpartition(", ")[0]
    assert forked.startswith((begun + other.replace("\u00b7", " ")).strip())
    assert "branch: " in browser.run("return document.querySelector('.assistant .note').textContent")
    # What is exported can be imported, and searched.
    storage = f"import('{bundled.url}/page/chat/storage.js')"
    kept = browser.run(f"return {storage}.then((found) => JSON.parse(found.toFile(found.load())))")
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps({**kept, "conversations": [kept["conversations"][0] | {"title": "Zanzibar"}]}))
    browser.choose_file("#import", file)
    browser.wait("document.getElementById('library-note').textContent === '1 conversation imported.'")
    assert browser.run("return document.querySelectorAll('#conversations .title').length") == 2
    for query, matches in (("zanzibar", 1), ("fox CROW", 2), ("nothing of that", 0)):
        browser.run(f"document.getElementById('search').value = {query!r}")
        browser.run("document.getElementById('search').dispatchEvent(new Event('input'))")
        browser.wait(f"document.getElementById('library-note').textContent.startsWith('{matches} of 2')")
    for bad in ("{", '{"conversations": []}', '{"messages": [{"id": 7}]}', "null", '{"messages": 3}'):
        file.write_text(bad)
        browser.choose_file("#import", file)
        browser.wait("/^(The file|Conversation 1)/.test(document.getElementById('library-note').textContent)")
        browser.run("document.getElementById('library-note').textContent = ''")
    assert browser.run("return document.querySelectorAll('#conversations .title').length") <= 2


def test_tools_are_called_and_answered(browser: Browser, hermes: ServerProcess) -> None:
    browser.show_as(is_phone=False, is_dark=False)
    browser.open_page(hermes.url)
    browser.run("document.getElementById('tools').value = '[{'; document.getElementById('max_tokens').value = 60")
    ask_it = SEND.format("How is the weather?")
    browser.run(ask_it)
    browser.wait("document.querySelector('.end.bad')?.textContent.startsWith('The tools are not JSON')")
    browser.run("document.getElementById('tools-example').click(); document.getElementById('new').click()")
    browser.run(ask_it)
    card = browser.wait("document.querySelector('.call pre')?.textContent")
    assert json.loads(card) == {"city": "Paris"}
    browser.wait("document.querySelector('.call textarea')?.labels.length")
    browser.run("document.querySelector('.call textarea').value = '{\"celsius\": 21}'")
    browser.click("Send the result")
    browser.wait("document.querySelectorAll('.message').length === 4")
    browser.wait(DONE)
    assert browser.run("return document.querySelector('.message.tool .text').textContent") == '{"celsius": 21}'
    assert not browser.run("return document.querySelector('.end')?.textContent")
    # The second call is the last message: it has the only box.
    assert browser.run("return document.querySelectorAll('.call textarea').length") == 1


def test_the_memory_while_it_fills(browser: Browser, bundled: ServerProcess) -> None:
    browser.show_as(is_phone=False, is_dark=False)
    browser.open_page(bundled.url, key=KEY)
    browser.click("Fill the memory")
    # A row is a request: it lights its blocks, and its button tells its tables and why its hit ended.
    browser.wait("document.querySelectorAll('#requests tbody tr').length > 8")
    browser.run("document.querySelector('#requests tbody button').focus()")
    browser.wait("document.querySelector('#requests tr.lit')")
    browser.wait("/[1-9][0-9]* swapped/.test(document.getElementById('queue').textContent)")
    browser.press("Enter")
    detail = browser.wait("!document.getElementById('detail').hidden && document.getElementById('detail').textContent")
    assert "Request #" in detail
    browser.press("Escape")
    assert browser.run("return document.getElementById('detail').hidden")
    browser.wait("document.activeElement.textContent.startsWith('#') || document.activeElement === document.body")
    browser.wait("/evicted/.test(document.getElementById('news').textContent)")
    # The map by keyboard: a cell is told, and opened.
    browser.run("document.getElementById('map').focus()")
    browser.press("Right", "Down", "+", "+")
    told = browser.run("return document.getElementById('announce-memory').textContent")
    assert re.match(r"device block \d+: (held by|idle|free)", told)
    browser.press("Enter")
    browser.wait("/^Block \\d+ Close ?On the device/.test(document.getElementById('detail').textContent)")
    assert browser.run("return document.getElementById('mapbox').scrollHeight > 300"), "zoomed in, the map scrolls"
    # The tree has a trunk that many hold, and the timeline a row for each request.
    browser.run("document.getElementById('tree').scrollIntoView()")
    labels = "[...document.querySelectorAll('#tree [role=treeitem]')].map((each) => each.ariaLabel)"
    trunk = browser.wait(f"{labels}.find((label) => /^Tokens 0 .*branches: You/.test(label))")
    assert re.match(r"Tokens 0 to \d+, (\d+ holders|idle), \d+ branches: You are a narrator", trunk)
    browser.wait("Number(document.getElementById('timeline').ariaLabel.match(/\\d+/)) > 8")
    browser.run("document.querySelector('#tree [tabindex=\"0\"]').focus()")
    browser.press("Down")
    assert browser.run("return document.activeElement.getAttribute('role')") == "treeitem"
    if browser.run("return document.getElementById('fill').textContent") == "Stop filling":
        browser.click("Stop filling")
    browser.wait("document.getElementById('fill').textContent === 'Fill the memory'")
    bundled.wait_until_idle()
    # A page that is hidden does not watch; once it is seen again, it does.
    hide = "Object.defineProperty(document, 'hidden', {{ value: {}, configurable: true }});"
    change = "document.dispatchEvent(new Event('visibilitychange'))"
    browser.run(hide.format("true") + change)
    browser.run("document.getElementById('counts').textContent = 'unseen'")
    bundled.post("/v1/completions", {"prompt": [70] * 90, "max_tokens": 1})
    time.sleep(0.5)
    assert browser.run("return document.getElementById('counts').textContent") == "unseen"
    browser.run(hide.format("false") + change)
    browser.wait("/[0-9] idle/.test(document.getElementById('counts').textContent)")


@pytest.mark.parametrize("is_phone", [False, True], ids=["desktop", "phone"])
def test_every_form_has_contrast_names_and_room(browser: Browser, bundled: ServerProcess, *, is_phone: bool) -> None:
    browser.show_as(is_phone=is_phone, is_dark=False)
    browser.open_page(bundled.url, key=KEY)
    is_typed = browser.run("return matchMedia('(hover: hover) and (pointer: fine)').matches")
    assert not (is_phone and is_typed)
    focused = browser.run("return document.activeElement.id")
    assert focused == ("input" if is_typed else ""), "a phone's keyboard does not open by itself"
    browser.run("document.getElementById('max_tokens').value = 16; document.getElementById('logprobs').click()")
    browser.ask("A table:\n\n| a | b |\n|---|---|\n| `code` | 1 |\n\n" + "long" * 200)
    browser.click("Tokens")
    browser.run("for (const each of document.querySelectorAll('details')) each.open = true")
    for is_dark in (False, True):
        browser.show_as(is_phone=is_phone, is_dark=is_dark)
        for tab in ("chat", "memory"):
            browser.run(f"document.getElementById('show-{tab}').click()")
            is_other_shown = browser.run("return document.getElementById('chat').checkVisibility()") and tab == "memory"
            assert is_other_shown == (tab == "memory" and not is_phone)
            for check in ("overflowing()", "lowContrast()", "nameless()", "misnamed()", "liveRegions()"):
                assert browser.check(check) == [], (check, tab, is_dark)


@pytest.mark.parametrize("is_phone", [False, True], ids=["desktop", "phone"])
def test_the_tab_key_reaches_everything_and_shows_where_it_is(
    browser: Browser, bundled: ServerProcess, *, is_phone: bool
) -> None:
    browser.show_as(is_phone=is_phone, is_dark=False)
    browser.open_page(bundled.url, key=KEY)
    browser.run("document.getElementById('max_tokens').value = 8; document.getElementById('input').focus()")
    # Enter sends, Shift and Enter would not; Escape stops.
    browser.press("H", "i", "Enter")
    browser.wait(DONE)
    assert browser.run("return document.querySelector('.user .text').textContent") == "Hi"
    if is_phone:
        browser.run("document.activeElement.blur()")
    seen = []
    browser.run("document.getElementById('talk').focus()")
    for _ in range(60):
        browser.press("Tab")
        at = browser.check("focused()")
        if at["tag"] == "BODY" or at["name"] == "talk":
            break
        assert at["isShown"], at
        assert at["isSeen"], at
        seen.append(at["name"])
    wanted = ["Edit: this message, as a new branch", "Copy: this answer", "input", "send", "thinking", "Parameters"]
    wanted += [] if is_phone else ["fill", "zoom-out", "zoom-fit", "zoom-in", "map"]
    assert [name for name in seen if name in wanted] == wanted
    # Before the messages are the header and the list of conversations.
    browser.run("document.getElementById(arguments[0]).focus()", "show-library" if is_phone else "theme")
    before = []
    for _ in range(20):
        before.append(browser.check("focused()")["name"])
        if before[-1] == "talk":
            break
        browser.press("Tab")
    wanted = ["show-library", "show-chat", "show-memory", "theme", "talk"]
    wanted = wanted if is_phone else ["theme", "new", "search", "Hi", "Rename Hi", "Delete Hi", "export-all", "talk"]
    assert [name for name in before if name in wanted] == wanted
