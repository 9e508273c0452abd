"""Nothing that was said is lost: two tabs, deletion, answers that were cut, and connections that ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import KEY
from tests.server.page.browser import DONE, SEND, Browser
from tests.server.page.meddler import Meddler
from tests.server.process import ServerProcess

pytestmark = pytest.mark.slow
TITLES = "[...document.querySelectorAll('#conversations .title')].map((each) => each.firstChild.textContent)"
TEXTS = "[...document.querySelectorAll('.message > .text')].map((each) => each.textContent)"
END = "(document.querySelector('.assistant:last-of-type .end span')?.textContent ?? '')"
ANSWER = "(document.querySelector('.assistant .text')?.textContent ?? '')"


@pytest.fixture(autouse=True)
def page(browser: Browser, bundled: ServerProcess) -> Iterator[None]:
    """Open the page; afterwards only the first tab is open."""
    browser.show_as(is_phone=False, is_dark=False)
    browser.open_page(bundled.url, key=KEY)
    first = browser.tab()
    yield
    for handle in browser.tabs():
        if handle != first:
            browser.go_to(handle)
            browser.close_tab()
    browser.go_to(first)


def limit(browser: Browser, max_tokens: int) -> None:
    browser.run("document.getElementById('max_tokens').value = arguments[0]", max_tokens)


def messages(browser: Browser, url: str) -> list[Any]:
    """Return what the storage holds of all conversations."""
    script = "return import(arguments[0] + '/page/chat/storage.js').then(({ load }) => load())"
    return [message for conversation in browser.run(script, url) for message in conversation["messages"]]


def second_tab(browser: Browser, url: str) -> str:
    handle = browser.new_tab()
    browser.show_as(is_phone=False, is_dark=False)
    browser.post("/url", url=url)
    browser.run("sessionStorage.setItem('quire.key', arguments[0])", KEY)
    browser.post("/refresh")
    browser.wait("document.querySelector('#talk').children.length > 0")
    return handle


def test_two_tabs_lose_no_word_of_each_other(browser: Browser, bundled: ServerProcess) -> None:
    limit(browser, 8)
    browser.ask("Who are you?")
    first = browser.tab()
    second = second_tab(browser, bundled.url)
    browser.wait(f"{TEXTS}.length === 2")
    browser.go_to(first)
    browser.ask("Question A")
    browser.wait(f"{TEXTS}.length === 4")
    # The second tab shows what the first said, without a reload.
    browser.go_to(second)
    browser.wait(f"{TEXTS}[2] === 'Question A'")
    limit(browser, 8)
    browser.run(SEND.format("Question B"))
    browser.wait(f"{TEXTS}.length === 6 && {DONE}")
    browser.go_to(first)
    browser.wait(f"{TEXTS}[4] === 'Question B'")
    browser.click("New chat")
    browser.ask("Another matter")
    browser.go_to(second)
    browser.wait(f"{TITLES}.includes('Another matter')")
    browser.go_to(first)
    browser.post("/refresh")
    browser.wait(f"{TITLES}.length === 2")
    said = [message["content"] for message in messages(browser, bundled.url) if message["role"] == "user"]
    assert sorted(said) == ["Another matter", "Question A", "Question B", "Who are you?"]


def test_what_two_tabs_say_at_once_stands_side_by_side(browser: Browser, bundled: ServerProcess) -> None:
    limit(browser, 8)
    browser.ask("Who are you?")
    first = browser.tab()
    second = second_tab(browser, bundled.url)
    browser.wait(f"{TEXTS}.length === 2")
    # Neither hears of the other, as if both wrote at the same moment.
    for handle in (second, first):
        browser.go_to(handle)
        browser.run("Object.defineProperty(StorageEvent.prototype, 'key', { get: () => 'nothing' })")
        limit(browser, 8)
    for handle, text in ((second, "Question B"), (first, "Question A")):
        browser.go_to(handle)
        browser.run(SEND.format(text))
        browser.wait(f"{TEXTS}.length === 4 && {DONE}")
    browser.post("/refresh")
    browser.wait(f"{TEXTS}[2] === 'Question A'")
    assert "/2" in browser.run("return [...document.querySelectorAll('.user .tools')].at(-1).textContent")
    kept = messages(browser, bundled.url)
    assert {"Who are you?", "Question A", "Question B"} <= {message["content"] for message in kept}
    assert len({message["id"] for message in kept}) == len(kept)


def test_a_conversation_that_was_deleted_comes_back(browser: Browser, bundled: ServerProcess) -> None:
    limit(browser, 8)
    for text in ("The first one", "The second one"):
        browser.click("New chat")
        browser.ask(text)
    before = messages(browser, bundled.url)
    browser.run("document.querySelector('[aria-label=\"Delete The first one\"]').click()")
    browser.wait(f"{TITLES}.join() === 'The second one'")
    assert len(messages(browser, bundled.url)) == 2
    browser.click("Undo")
    browser.wait(f"{TITLES}.length === 2")
    restored = messages(browser, bundled.url)
    assert {message["id"]: message for message in restored} == {message["id"]: message for message in before}
    # A title can be changed, and what is deleted in one tab is gone in the other, which can bring it back.
    browser.run("document.querySelector('[aria-label=\"Rename The first one\"]').click()")
    browser.run("document.activeElement.value = 'Renamed'")
    browser.press("Enter")
    browser.wait(f"{TITLES}.includes('Renamed')")
    first = browser.tab()
    second = second_tab(browser, bundled.url)
    browser.wait(f"{TITLES}.includes('Renamed')")
    browser.go_to(first)
    browser.run("document.querySelector('[aria-label=\"Delete Renamed\"]').click()")
    browser.go_to(second)
    browser.wait(f"{TITLES}.join() === 'The second one'")
    browser.click("Undo")
    browser.go_to(first)
    browser.wait(f"{TITLES}.includes('Renamed')")


def test_an_answer_that_was_cut_says_so_and_goes_on(browser: Browser) -> None:
    limit(browser, 5)
    browser.ask("What is Quire?")
    begun = browser.run(f"return {ANSWER}")
    assert browser.run(f"return {END}") == "Cut at 5 tokens."
    browser.click("Continue")
    browser.wait(f"{END} === 'Cut at 10 tokens.' && {DONE}")
    longer = browser.run(f"return {ANSWER}")
    assert longer.startswith(begun)
    assert len(longer) > len(begun)
    limit(browser, 200)
    browser.click("Continue")
    browser.wait(f"document.querySelector('.end') === null && {DONE}")
    # The answer is what it would have been in one piece, and there is one.
    assert browser.run(f"return {TEXTS}.length") == 2
    browser.run("document.getElementById('temperature').value = 0")
    assert browser.run("return document.querySelector('.assistant .tools').textContent").startswith("Regenerate")


def test_an_answer_that_was_stopped_says_so_and_is_kept(browser: Browser) -> None:
    browser.run("document.getElementById('max_tokens').value = 900")
    browser.run("document.getElementById('samples').value = 1")
    browser.run(SEND.format("Write a very long story about a whale and the sea. " * 4))
    browser.wait(f"{ANSWER}.length > 0")
    browser.press("Escape")
    browser.wait(DONE)
    ended = browser.run(f"return {END}")
    assert ended in ("Stopped.", ""), "an answer that was complete before has no end to name"
    before = browser.run(f"return {ANSWER}")
    browser.post("/refresh")
    browser.wait(f"{TEXTS}.length === 2")
    assert browser.run(f"return {ANSWER}") == before
    assert browser.run(f"return {END}") == ended


@pytest.mark.parametrize("fault", ["end", "drop"])
def test_an_answer_whose_connection_ended_is_kept_and_goes_on(
    browser: Browser, bundled: ServerProcess, meddler: Meddler, fault: Any
) -> None:
    browser.open_page(meddler.url, key=KEY)
    meddler.fault = fault
    limit(browser, 300)
    browser.ask("Tell me a long story about a fox and a crow.")
    assert browser.run(f"return {END}") == "The connection ended."
    begun = browser.run(f"return {ANSWER}")
    assert begun
    # The storage has it too, and its copy is what is shown.
    browser.post("/refresh")
    browser.wait(f"{ANSWER} === {json.dumps(begun)}")
    meddler.fault = ""
    limit(browser, 60)
    browser.click("Continue")
    browser.wait(f"{ANSWER}.length > {len(begun)} && {DONE}")
    assert browser.run(f"return {ANSWER}").startswith(begun)
    bundled.wait_until_idle()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("html", "502: the answer is no JSON; it may come from a proxy before the server."),
        ("gone", "The server cannot be reached."),
    ],
)
def test_errors_are_said_in_words_and_can_be_tried_again(
    browser: Browser, meddler: Meddler, fault: Any, words: str
) -> None:
    browser.open_page(meddler.url, key=KEY)
    meddler.fault = fault
    limit(browser, 8)
    browser.ask("Who are you?")
    assert browser.run(f"return {END}") == words
    assert browser.run(f"return {TEXTS}[0]") == "Who are you?"
    meddler.fault = ""
    browser.click("Try again")
    browser.wait(f"{ANSWER}.length > 0 && {DONE}")


def test_an_unfinished_answer_and_an_unsent_text_outlive_a_reload(browser: Browser) -> None:
    limit(browser, 900)
    browser.run(SEND.format("Write a very long story. " * 8))
    script = 'Object.values(localStorage).some((text) => text.includes(\'"end":"open"\') && !/content":""/.test(text))'
    browser.wait(f"{script} || {DONE}")
    browser.post("/refresh")
    browser.wait(f"{TEXTS}.length === 2")
    assert browser.run(f"return {TEXTS}[0]").startswith("Write a very long story.")
    assert browser.run(f"return {ANSWER}")
    browser.run("document.getElementById('input').focus()")
    browser.press("H", "i")
    browser.post("/refresh")
    browser.wait("document.getElementById('input').value === 'Hi'")


def test_conversations_of_the_page_before_are_read(browser: Browser) -> None:
    old = {"id": "one", "changed": 5, "title": "Old", "leaf": 1, "messages": [
        {"id": 0, "parent": None, "role": "user", "content": "a"},
        {"id": 1, "parent": 0, "role": "assistant", "content": "b", "note": "n"},
        {"id": 2, "parent": 0, "role": "assistant", "content": "c"},
    ]}  # fmt: skip
    browser.run("localStorage.setItem('quire.conversation.one', JSON.stringify(arguments[0]))", old)
    browser.post("/refresh")
    browser.wait(f"{TEXTS}.join() === 'a,b'")
    assert "1/2" in browser.run("return document.querySelector('.assistant .tools').textContent")
    limit(browser, 8)
    browser.ask("d")
    browser.post("/refresh")
    browser.wait(f"{TEXTS}.slice(0, 3).join() === 'a,b,d'")


def test_the_model_thinks_where_it_is_asked_to(browser: Browser) -> None:
    limit(browser, 400)
    assert browser.run("return document.getElementById('thinking').checkVisibility()")
    browser.run("document.getElementById('thinking').value = 'none'")
    browser.ask("What is 17 plus 25?")
    assert not browser.run("return document.querySelector('.thinking')?.textContent")
    browser.run("document.getElementById('thinking').value = 'high'")
    browser.click("Regenerate")
    browser.wait(f"document.querySelector('.thinking div')?.textContent && {DONE}")


def test_the_keyboard_searches(browser: Browser) -> None:
    limit(browser, 8)
    for text in ("About whales", "About foxes"):
        browser.click("New chat")
        browser.ask(text)
    browser.run("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'k', ctrlKey: true, bubbles: true }))")
    assert browser.run("return document.activeElement.id") == "search"
    browser.press(*"whale")
    browser.wait(f"{TITLES}.join() === 'About whales'")
    browser.press("Enter")
    browser.wait(f"{TEXTS}[0] === 'About whales'")
