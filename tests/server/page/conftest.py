"""One browser and one server for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.conftest import KEY
from tests.server.page.browser import Browser, browsing, missing_browser
from tests.server.page.meddler import Meddler, meddling
from tests.server.process import ServerProcess, running


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests; they share the storage of the page at each address."""
    why = missing_browser()
    if why is not None:
        pytest.skip(why)
    with browsing(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="session")
def bundled(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:  # noqa: ARG001
    """A server with a key, little memory and a swap space, for the browser only."""
    log = tmp_path_factory.mktemp("logs") / "page.log"
    flags = ("--num-kv-blocks", "300", "--swap-space", "8MiB")
    with running(Path("bundled"), log, *flags, key=KEY) as server:
        yield server


@pytest.fixture
def meddler(bundled: ServerProcess) -> Iterator[Meddler]:
    """A proxy before that server, which spoils what it is told to spoil."""
    with meddling(bundled.url) as proxy:
        yield proxy
