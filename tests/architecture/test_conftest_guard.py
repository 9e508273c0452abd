"""The guard against network access, and the cover of pairs of parameters, must themselves be seen to work."""

from __future__ import annotations

import socket
from itertools import combinations, product
from pathlib import Path

import pytest

from tests.conftest import cover_of, pytest_ignore_collect


def test_a_connection_to_another_machine_is_refused(network_attempts: list[str]) -> None:
    with socket.socket() as sock, pytest.raises(RuntimeError, match="stay on this machine"):
        sock.connect(("192.0.2.1", 80))
    assert network_attempts == ["('192.0.2.1', 80)"]
    network_attempts.clear()


def test_a_name_is_not_looked_up(network_attempts: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"example\.org"):
        socket.create_connection(("example.org", 443), timeout=1)
    network_attempts.clear()


def test_this_machine_can_be_reached() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=5) as client,
    ):
        peer, _ = server.accept()
        with peer:
            client.sendall(b"quire")
            assert peer.recv(5) == b"quire"


def test_a_cover_of_pairs_has_every_pair_in_few_cases() -> None:
    values = [
        [("level", level) for level in range(5)],
        [("dtype", dtype) for dtype in range(3)],
        [("rows", 1), ("rows", 9)],
    ]
    pairs = {case: {*combinations(case, 2)} for case in product(*values)}
    cover = cover_of(pairs)
    assert set().union(*(pairs[case] for case in cover)) == set().union(*pairs.values())
    # No fewer than the two longest lists have pairs, and far fewer than the product.
    assert 15 <= len(cover) <= 18 < len(pairs)


def test_of_two_cases_that_add_as_much_the_first_is_taken() -> None:
    pairs = {"small": {1}, "first": {1, 2, 3}, "same": {3, 2, 1}, "overlapping": {3, 4, 5}, "last": {5, 4}}
    assert cover_of(pairs) == ["first", "overlapping"]


@pytest.mark.parametrize(("expression", "is_left_out"), [("not slow", True), ("slow", None), ("", None)])
def test_a_slow_module_is_left_out_where_slow_tests_are(
    expression: str,
    is_left_out: bool | None,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pytestconfig.option, "markexpr", expression)
    slow, some_slow = tmp_path / "test_slow.py", tmp_path / "test_some_slow.py"
    slow.write_text("import pytest\n\npytestmark = pytest.mark.slow\n")
    some_slow.write_text("import pytest\n\n@pytest.mark.slow\ndef test_it() -> None: ...\n")
    assert pytest_ignore_collect(slow, pytestconfig) is is_left_out
    assert pytest_ignore_collect(some_slow, pytestconfig) is None
