"""The guard against network access must itself be seen to work."""

from __future__ import annotations

import socket

import pytest


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
