"""The files of the page and their policy."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

import httpx
import pytest

import quire.server
from quire.server.operations.page_files import MEDIA_TYPES
from tests.server.process import PATIENCE_S, ServerProcess

FOLDER = Path(quire.server.__file__).parent / "page"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
OURS = [name for name in FILES if not name.startswith("vendor/")]
LIBRARIES = [name for name in FILES if name.startswith("vendor/") and not name.endswith(".txt")]
MAX_COMPRESSED = 150 * 1024


def test_the_page_needs_no_key_and_its_files_come_with_a_strict_policy(narrow_server: ServerProcess) -> None:
    for path in ("/", *(f"/page/{name}" for name in FILES)):
        answer = httpx.get(narrow_server.url + path, timeout=PATIENCE_S)
        assert answer.status_code == 200
        kind = "text/html" if path == "/" else MEDIA_TYPES[path.rpartition(".")[2]]
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"https?:", policy)
    for path in (
        "nothing.js",
        "..%2Fapp.py",
        "../app.py",
        "chat",
        "chat/",
        "chat/../../app.py",
        "vendor",
    ):
        assert httpx.get(f"{narrow_server.url}/page/{path}", timeout=PATIENCE_S).status_code in (401, 404)
    assert httpx.get(f"{narrow_server.url}/kv/map", timeout=PATIENCE_S).status_code == 401


def test_a_file_that_the_browser_has_is_not_sent_again(narrow_server: ServerProcess) -> None:
    url = f"{narrow_server.url}/page/{LIBRARIES[0]}"
    plain = httpx.get(url, headers={"Accept-Encoding": "identity"}, timeout=PATIENCE_S)
    packed = httpx.get(url, headers={"Accept-Encoding": "gzip"}, timeout=PATIENCE_S)
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content == (FOLDER / LIBRARIES[0]).read_bytes()
    assert packed.num_bytes_downloaded < plain.num_bytes_downloaded / 2
    tag = plain.headers["etag"]
    known = httpx.get(url, headers={"If-None-Match": tag}, timeout=PATIENCE_S)
    assert (known.status_code, known.content) == (304, b"")
    other = httpx.get(f"{narrow_server.url}/", headers={"If-None-Match": tag}, timeout=PATIENCE_S)
    assert other.status_code == 200


@pytest.mark.parametrize("name", OURS)
def test_a_file_of_the_page_is_short_and_names_no_other_host(name: str) -> None:
    text = (FOLDER / name).read_text()
    lines = text.splitlines()
    assert len(lines) <= 600
    assert max(map(len, lines)) <= 120
    named = re.findall(r"https?://[^\"'`/]+|[\"'(]//[a-z0-9]+\.[a-z]+", text)
    assert set(named) <= {"http://www.w3.org"}, "only the name of MathML's namespace"
    # Text of the model becomes text nodes only.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|<script>|\son\w+=\"", text)


def test_folders_of_the_page_are_small_and_all_of_it_is_little_to_load() -> None:
    for folder in {(FOLDER / name).parent for name in FILES}:
        assert len(list(folder.iterdir())) <= 20
    loaded = [(FOLDER / name).read_bytes() for name in FILES if not name.endswith(".txt")]
    assert sum(len(gzip.compress(data)) for data in loaded) <= MAX_COMPRESSED


def test_each_library_is_what_was_published_and_has_its_licence() -> None:
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text()
    assert LIBRARIES
    for name in LIBRARIES:
        file = FOLDER / name
        part = re.search(rf"^\S+ \d+\.\d+\.\d+: {re.escape(file.name)}\nSHA-256: (\w+)\n", licences, re.MULTILINE)
        assert part, f"{name} is not listed"
        assert part[1] == hashlib.sha256(file.read_bytes()).hexdigest()
        assert "Permission is hereby granted" in licences[part.end() :].partition("-" * 72)[0]
