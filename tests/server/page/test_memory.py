"""The live view of the memory: the prefix tree, what is pointed at, and what is shown when there is nothing to see."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.conftest import KEY
from tests.server.page.browser import Browser
from tests.server.page.meddler import Meddler
from tests.server.process import PATIENCE_S, ServerProcess, running

pytestmark = pytest.mark.slow
OPERATOR_KEY = "another secret"
SIZES = {"desktop": (1440, 900), "zoomed": (720, 450), "phone": (390, 844), "turned phone": (844, 390)}
TREE = "document.getElementById('tree')"


@pytest.fixture(scope="module")
def unlocked(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:  # noqa: ARG001
    """A server without a key, for the browser only."""
    with running(Path("bundled"), tmp_path_factory.mktemp("logs") / "open.log", "--num-kv-blocks", "600") as server:
        yield server


def complete(server: ServerProcess, prompt: str) -> None:
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    assert server.post("/v1/completions", body).status_code == 200


def see_tree(browser: Browser) -> None:
    browser.run("document.getElementById('show-memory').click()")
    browser.run(f"{TREE}.scrollIntoView()")


@pytest.mark.parametrize("name", SIZES)
def test_nothing_in_the_prefix_tree_is_printed_over_anything(
    browser: Browser, unlocked: ServerProcess, name: str
) -> None:
    unlocked.post("/reset_prefix_cache", {})
    beginning = "There was a fox in the forest who wanted to know everything about the sea and its ships. "
    for theme in ("A whale came.", "A storm came.", "Then the fox slept for a long time, and dreamt of a kite. One.",
                  "Then the fox slept for a long time, and dreamt of a kite. Two."):  # fmt: skip
        complete(unlocked, beginning + theme)
    for number in range(5):
        complete(unlocked, f"{number} different questions about {number} different matters, of which none is shared")
    browser.look(*SIZES[name], is_phone="phone" in name)
    browser.open_page(unlocked.url)
    see_tree(browser)
    browser.wait(f"{TREE}.querySelectorAll('text').length >= 4")
    assert browser.check("overprinted()") == []
    shown = browser.run(f"return [...{TREE}.querySelectorAll('text')].map((each) => each.textContent)")
    assert shown[0].startswith("There was a fox")
    # What shares nothing is one line, which unfolds.
    fold = "document.getElementById('tree-alone')"
    assert browser.run(f"return {fold}.textContent") == "Show 5 idle prompts that share nothing"
    browser.run(f"{fold}.click()")
    browser.wait(f"{TREE}.querySelectorAll('text').length === {len(shown) + 5}")
    assert browser.check("overprinted()") == []
    browser.run(f"{fold}.click()")
    browser.wait(f"{TREE}.querySelectorAll('text').length === {len(shown)}")


def test_the_prompt_that_was_used_last_comes_first(browser: Browser, unlocked: ServerProcess) -> None:
    unlocked.post("/reset_prefix_cache", {})
    trunks = ("All about whales, who live in the sea and sing. ", "All about foxes, who live in the woods and steal. ")
    for trunk in trunks:
        for end in ("One more.", "Two or more of them."):
            complete(unlocked, trunk * 2 + end)
    browser.look(1440, 900)
    browser.open_page(unlocked.url)
    see_tree(browser)
    first = f"{TREE}.querySelector('text')?.textContent.startsWith({{}})"
    browser.wait(first.format(json.dumps("All about foxes")))
    complete(unlocked, trunks[0] * 2 + "Three, and the whales went home.")
    browser.wait(first.format(json.dumps("All about whales")))


def test_a_block_is_told_where_it_is_pointed_at(browser: Browser, unlocked: ServerProcess) -> None:
    complete(unlocked, "Something that leaves blocks behind, so that there is something to point at.")
    browser.look(1440, 900)
    browser.open_page(unlocked.url)
    at = browser.run("const { x, y } = document.getElementById('map').getBoundingClientRect(); return [x + 5, y + 5]")
    point = {"type": "mouseMoved", "x": at[0], "y": at[1]}
    browser.post("/goog/cdp/execute", cmd="Input.dispatchMouseEvent", params=point)
    tip = "document.getElementById('map-tip')"
    told = browser.wait(f"{tip}.checkVisibility() && {tip}.textContent")
    assert re.fullmatch(r"device block 1: (idle|free|held by .*)", told)
    browser.post("/goog/cdp/execute", cmd="Input.dispatchMouseEvent", params={**point, "x": 5, "y": 5})
    browser.wait(f"{tip}.hidden")


def test_holders_of_a_block_are_one_line(browser: Browser, unlocked: ServerProcess) -> None:
    browser.look(1440, 900)
    browser.open_page(unlocked.url)
    script = """
    const held = [...Array(20).keys()].map((number) => ({ number, sample: 0, first_token: 0 }));
    const found = { tier: 'device', holders: 23, is_published: true, pins: [], text: 't', unchanged_s: 1.5,
      held_by: [...held, { number: 14, sample: 1, first_token: 0 }] };
    const before = window.fetch;
    window.fetch = async (path, options) =>
      String(path).includes('kv/block') ? new Response(JSON.stringify(found)) : before(path, options);
    return import(arguments[0] + '/page/memory/detail.js').then(({ showBlock }) => showBlock(0, 3)).then(() => {
      window.fetch = before;
      return [...document.querySelectorAll('#detail div')].map((line) => line.textContent);
    });
    """
    lines = browser.run(script, unlocked.url)
    names = ", ".join(f"#{number}" + (" (2 samples)" if number == 14 else "") for number in range(20))
    assert lines[1] == f"Held by 23: {names}, 2 of others"
    assert len(lines) == 4


def test_a_lost_connection_is_grey_and_says_since_when(browser: Browser, meddler: Meddler) -> None:
    browser.look(1440, 900)
    browser.open_page(meddler.url, key=KEY)
    stale = "document.getElementById('stale')"
    assert not browser.run(f"return {stale}.checkVisibility()")
    meddler.leave()
    said = browser.wait(f"{stale}.checkVisibility() && {stale}.textContent")
    assert re.fullmatch(r"The connection was lost at [0-9:]+( [AP]M)?\. What is shown is from then\.", said)
    style = "getComputedStyle(document.getElementById('map')).filter"
    assert "grayscale(1)" in browser.run(f"return {style}")
    browser.wait("document.getElementById('state').textContent === 'not reachable'")
    meddler.fault = ""
    browser.wait(f"!{stale}.checkVisibility()")
    assert browser.run(f"return {style}") == "none"


@pytest.mark.parametrize("name", SIZES)
def test_with_the_key_of_a_client_the_memory_is_one_line(browser: Browser, tmp_path: Path, name: str) -> None:
    flags = ("--num-kv-blocks", "300", "--operator-key", OPERATOR_KEY)
    with running(Path("bundled"), tmp_path / "log", *flags, key=KEY) as server:
        browser.look(*SIZES[name], is_phone="phone" in name)
        browser.post("/url", url=server.url)
        browser.run("localStorage.clear(); sessionStorage.setItem('quire.key', arguments[0])", KEY)
        browser.post("/refresh")
        browser.wait("!document.getElementById('locked').hidden")
        browser.run("document.getElementById('show-memory').click()")
        assert not browser.run("return document.getElementById('map').checkVisibility()")
        assert not browser.run("return document.querySelector('#memory h2').checkVisibility()")
        height = browser.run("return document.getElementById('locked').getBoundingClientRect().height")
        assert height < 60
        assert browser.check("overflowing()") == []
        browser.click("Enter another key")
        browser.run("document.getElementById('key').value = arguments[0]", OPERATOR_KEY)
        browser.run("document.querySelector('dialog button').click()")
        browser.wait("document.getElementById('map').checkVisibility()")
        assert httpx.get(f"{server.url}/kv/map", timeout=PATIENCE_S).status_code == 401


@pytest.mark.parametrize("name", SIZES)
def test_the_chat_has_room_in_every_window(browser: Browser, unlocked: ServerProcess, name: str) -> None:
    width, height = SIZES[name]
    browser.look(width, height, is_phone="phone" in name)
    browser.open_page(unlocked.url)
    browser.run("document.getElementById('show-chat').click()")
    room = browser.run("return document.getElementById('talk').getBoundingClientRect().height")
    assert room >= 0.65 * height
    assert browser.run("return document.documentElement.scrollHeight <= innerHeight")
    is_beside = browser.run("return document.getElementById('library').checkVisibility({ visibilityProperty: true })")
    assert is_beside == (name == "desktop")
    browser.run("for (const each of document.querySelectorAll('details')) each.open = true")
    browser.run("document.body.classList.add('with-library')")
    browser.wait("document.getElementById('library').getBoundingClientRect().left >= 0")
    assert browser.check("overflowing()") == []
    assert browser.check("lowContrast()") == []
