"""Images by URL: what is read, and what a client cannot make a server fetch."""

from __future__ import annotations

import base64
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.engine.inputs.images import sources
from quire.engine.inputs.images.sources import ImageSources, is_public
from quire.errors import InvalidParameter, RequestError, UnsupportedFeature

DATA = bytes(range(256))
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 256\r\n\r\n" + DATA


@pytest.fixture
def site() -> Iterator[Callable[[bytes], int]]:
    """Gives a function that answers one connection with bytes, and returns its port."""
    listeners: list[socket.socket] = []

    def serve(answer: bytes) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                seen = b""
                while b"\r\n\r\n" not in seen:
                    seen += connection.recv(4096)
                connection.sendall(answer)
                if answer.endswith(b"..."):  # it never ends
                    connection.recv(1)

        threading.Thread(target=run, daemon=True).start()
        return int(listener.getsockname()[1])

    yield serve
    for listener in listeners:
        listener.close()


def local() -> ImageSources:
    """Return sources for which the address of this machine is one of the internet."""
    return ImageSources(
        ["pictures.test"], resolver=lambda _host, _port: ["127.0.0.1"], is_allowed=lambda _address: True
    )


@pytest.mark.parametrize("url", ["data:image/png;base64,", "data:;base64,", "DATA:image/x-icon;charset=x;base64,"])
def test_data_urls_are_decoded(url: str) -> None:
    assert ImageSources().read("image_url", url + base64.b64encode(DATA).decode()) == DATA


@pytest.mark.parametrize(
    "url",
    [
        *("data:image/png,abc", "data:image/png;base64,*", "data:image/png;base64,abc", "data:image/png", "data:"),
        *(
            "gopher://pictures.test/",
            "pictures.test/a.png",
            "",
            "http://[",
            "http://pictures.test:99999/",
            "javascript:0",
        ),
    ],
)
def test_other_urls_are_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidParameter, match="messages") as refused:
        ImageSources(["pictures.test"]).read("messages[0]", url)
    assert refused.value.field == "messages[0]"


@pytest.mark.parametrize("num_before", range(3))
def test_percent_escapes_are_resolved_wherever_parts_end(num_before: int) -> None:
    data = bytes(range(256)) * 400
    text = base64.b64encode(data).decode()
    escaped = text[:num_before] + "".join(f"%{ord(char):02x}" for char in text[num_before:])
    assert len(escaped) > 4 * sources.ESCAPED_CHARS
    assert ImageSources().read("image_url", f"data:image/png;base64,{escaped}") == data


def test_percent_escapes_cost_little_memory() -> None:
    """All at once, the library would take a hundred bytes for each."""
    url = "data:image/png;base64," + "%41" * (1 << 20)
    tracemalloc.start()
    try:
        assert ImageSources().read("image_url", url) == bytes(3 << 18)
        assert tracemalloc.get_traced_memory()[1] < 6 * len(url)
    finally:
        tracemalloc.stop()
    with pytest.raises(InvalidParameter, match="33554432 characters"):
        ImageSources().read("image_url", "data:image/png;base64," + "%41%" * (8 << 20))


@pytest.mark.parametrize("url", ["data:" + ";" * (1 << 20), "data:" + "a" * (1 << 20), "http://a/" + "b" * (1 << 20)])
def test_a_long_head_of_a_url_costs_no_memory(url: str) -> None:
    """A part that repeats would take a hundred bytes for each repetition."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidParameter, match=r"image_url must be a data URL"):
            ImageSources().read("image_url", url)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_base64_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PIECE_CHARS", 8)
    text = base64.b64encode(DATA).decode()
    for length in (0, 4, 8, 12, 16, 300, len(text)):
        part = text[: length // 4 * 4]
        assert ImageSources().decode("data", part) == base64.b64decode(part)
    for wrong in (text[:7], text[:9], "AAA=AAAA", "AAAAAAA=AAAA", "AAAA AAAA", "AA==AA==AAAA", "AAAAAA\u00e9A"):
        with pytest.raises(InvalidParameter, match="data must be an image file in base64"):
            ImageSources().decode("data", wrong)


def test_a_long_data_url_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(InvalidParameter, match="at most 20 MiB"):
        ImageSources().read("image", "data:;base64," + "A" * (sources.MAX_BYTES * 4 // 3 + 100))


def test_nothing_is_fetched_or_opened_unless_the_operator_says_so(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(DATA)
    for url, option in (
        ("http://pictures.test/", "--allowed-media-domains"),
        (file.as_uri(), "--allowed-local-media-path"),
    ):
        with pytest.raises(UnsupportedFeature, match=option):
            ImageSources().read("image", url)


def test_files_are_read_below_the_folder_only(tmp_path: Path) -> None:
    inner, outer = tmp_path / "pictures" / "a b.png", tmp_path / "secret.png"
    inner.parent.mkdir()
    for path in (inner, outer):
        path.write_bytes(DATA)
    (inner.parent / "link.png").symlink_to(outer)
    found = ImageSources(folder=inner.parent)
    assert found.read("image", inner.as_uri()) == DATA
    below = inner.parent.as_uri()
    for url in (outer.as_uri(), f"{below}/../secret.png", f"{below}/%2e%2e/secret.png", f"{below}/link.png"):
        with pytest.raises(UnsupportedFeature, match="not below"):
            found.read("image", url)
    for url in (f"{below}/none.png", below, f"{below}/a%00b.png", "file://other.test/a.png"):
        with pytest.raises(InvalidParameter):
            found.read("image", url)


def test_a_page_of_a_named_host_is_fetched(site: Callable[[bytes], int]) -> None:
    assert local().read("image", f"http://Pictures.test:{site(OK)}/a?b=c") == DATA
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n" + DATA + b"\r\n0\r\n\r\n"
    assert local().read("image", f"http://pictures.test:{site(chunked)}/") == DATA


@pytest.mark.parametrize(
    "host", ["www.pictures.test", "pictures.test.evil.test", "127.0.0.1", "[::1]", "evil.test#pictures.test"]
)
def test_other_hosts_are_not_resolved(host: str) -> None:
    def resolver(_host: str, _port: int) -> list[str]:
        raise AssertionError("resolved")

    with pytest.raises(UnsupportedFeature, match="host"):
        ImageSources(["pictures.test"], resolver=resolver).read("image", f"http://{host}/")


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], []])
def test_an_address_that_is_not_public_is_not_connected_to(site: Callable[[bytes], int], addresses: list[str]) -> None:
    found = ImageSources(["pictures.test"], resolver=lambda _host, _port: addresses)
    with pytest.raises(UnsupportedFeature, match="not public"):
        found.read("image", f"http://pictures.test:{site(OK)}/")


def test_a_name_that_changes_after_the_check_changes_nothing(site: Callable[[bytes], int]) -> None:
    answers = iter([["127.0.0.1"]])
    found = ImageSources(
        ["pictures.test"], resolver=lambda _host, _port: next(answers), is_allowed=lambda _address: True
    )
    assert found.read("image", f"http://pictures.test:{site(OK)}/") == DATA


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab",
        b"not HTTP\r\n\r\n",
        b"",
    ],
)
def test_a_bad_answer_is_the_requests_error(site: Callable[[bytes], int], answer: bytes) -> None:
    with pytest.raises(InvalidParameter):
        local().read("image", f"http://pictures.test:{site(answer)}/")


def test_a_page_without_an_end_is_cut(site: Callable[[bytes], int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_BYTES", 100)
    with pytest.raises(InvalidParameter, match="more than 100 bytes"):
        local().read("image", f"http://pictures.test:{site(OK)}/")
    monkeypatch.setattr(sources, "FETCH_TIMEOUT_S", 0.3)
    for answer in (b"HTTP/1.1 200 OK\r\nX: ...", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\na..."):
        with pytest.raises(RequestError, match=r"more than 0.3 s"):
            local().read("image", f"http://pictures.test:{site(answer)}/")


@pytest.mark.parametrize(
    ("address", "wanted"),
    [
        *((address, False) for address in ("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((address, False) for address in ("0.0.0.0", "100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1")),
        *((address, False) for address in ("::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:10.0.0.1")),
        *((address, False) for address in ("64:ff9b::7f00:1", "2002:7f00:1::", "::ffff:127.0.0.1", "2001:db8::1")),
        *((address, True) for address in ("93.184.216.34", "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946")),
        ("64:ff9b::808:808", True),
    ],
)
def test_public_addresses(address: str, wanted: bool) -> None:
    assert is_public(address) is wanted
