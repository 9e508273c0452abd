"""The files of the page and their policy."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import quire.server
from tests.server.process import PATIENCE_S, ServerProcess

FOLDER = Path(quire.server.__file__).parent / "page"


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
