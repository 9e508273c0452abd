"""What holds for every test: few threads, no network, visible skips, repeatable searches."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Read by libraries when they are first imported, so set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

settings.register_profile("person", deadline=None)
settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "person")


class NetworkBlocked(RuntimeError):
    """A test tried to reach another machine."""


def is_loopback(address: Any) -> bool:
    """Tell whether a socket address (of any family) stays on this machine."""
    if not isinstance(address, tuple):
        return True  # a path: AF_UNIX
    return is_loopback_host(address[0])


def is_loopback_host(host: str | bytes | None) -> bool:
    """Tell whether a host name or address is this machine, without asking a name server."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        parsed = ipaddress.ip_address(str(name).partition("%")[0])
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


@pytest.fixture(scope="session", autouse=True)
def network_attempts() -> Iterator[list[str]]:
    """Refuse every connection and name look-up that leaves this machine, and list the attempts."""
    attempts: list[str] = []
    connect, connect_ex, getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo

    def refuse(target: object) -> None:
        attempts.append(repr(target))
        raise NetworkBlocked(f"tests stay on this machine, but something wanted to reach {target!r}")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if not is_loopback(address):
            refuse(address)
        connect(self, address)

    def guarded_connect_ex(self: socket.socket, address: Any) -> int:
        if not is_loopback(address):
            refuse(address)
        return connect_ex(self, address)

    def guarded_getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_loopback_host(host):
            refuse(host)
        return getaddrinfo(host, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded_connect)
        patch.setattr(socket.socket, "connect_ex", guarded_connect_ex)
        patch.setattr(socket, "getaddrinfo", guarded_getaddrinfo)
        yield attempts


@pytest.fixture(autouse=True)
def no_network(network_attempts: list[str]) -> Iterator[None]:
    """Fail a test that tried to leave this machine even where its code swallowed the error."""
    network_attempts.clear()
    yield
    attempts = list(network_attempts)
    network_attempts.clear()
    assert not attempts, f"the test tried to reach {', '.join(attempts)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, visibly, the tests that need a GPU where there is none."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
