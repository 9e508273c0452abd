"""Notifications arrive at the socket that the service manager names, and trouble with it stops nobody."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
from pathlib import Path

import pytest

from quire.platform.child_process import ChildProcess
from quire.platform.service_manager import VARIABLE, notify


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_arrive_in_one_message(is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"@quire-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path.replace("@", "\0"))
        monkeypatch.setenv(VARIABLE, path)
        notify("READY=1", "STATUS=serves")
        assert manager.recv(1000) == b"READY=1\nSTATUS=serves"


@pytest.mark.parametrize("address", ["/nowhere/notify", "x" * 200, "@"])
def test_an_address_without_a_manager_is_logged(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, address)
    with caplog.at_level(logging.WARNING):
        notify("READY=1")
    assert "the service manager cannot be told READY=1" in caplog.text


def test_without_a_manager_nothing_happens(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    notify("READY=1")
    assert caplog.text == ""


def tell() -> None:
    """Print the address that this process has."""
    print(os.environ.get(VARIABLE), os.environ["PATH"], flush=True)


def test_child_processes_have_no_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "/run/notify")
    with ChildProcess(f"{__name__}:tell", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.read().decode() == f"None {os.environ['PATH']}\n"
