"""API keys, and the host names that are answered without one."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest
from starlette.responses import Response

from quire.errors import ConfigError
from quire.server.settings import ServerConfig, is_loopback
from quire.server.state.auth import Guard, is_local_host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    ServerConfig(host=host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "192.168.1.4", "example.org", "localhost.evil.org"])
def test_an_open_address_without_a_key_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="API key") as caught:
        ServerConfig(host=host)
    assert caught.value.field == "host"
    ServerConfig(host=host, api_key="k")


@pytest.mark.parametrize(
    "options", [{"port": 65536}, {"port": -1}, {"api_key": " "}, {"max_prompts": 0}, {"max_connections": 0}]
)
@pytest.mark.parametrize("more", [{}, {"ping_interval_s": float("nan")}])
def test_options_out_of_range_are_refused(options: dict[str, object], more: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**options, **more)  # type: ignore[arg-type]


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_key="secret"))


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "127.0.0.1:80", "[::1]:8000", "10.1.2.3", "a.localhost:1"),
        *("LOCALHOST", "LocalHost:80", "localhost.", "localhost.:80", "A.Localhost.", "[::1]", "localhost:"),
    ],
)
def test_names_that_nobody_can_point_here(host: str) -> None:
    assert is_local_host(host)


@pytest.mark.parametrize(
    "host",
    [
        *("", "evil.org", "evil.org:8000", "localhost.evil.org", "127.0.0.1.evil.org", "::evil"),
        *("[127.0.0.1", "127.0.0.1]", "[127.0.0.1]", "[localhost]", "localhost..", "::1:80x", "[::1]x", "[", "]", "[]"),
        *("localhost:x", "evil.org:localhost", "localhost@evil.org", "localhost evil.org", "localhost:\u00b2", "::1"),
    ],
)
def test_names_that_somebody_can_point_here(host: str) -> None:
    assert not is_local_host(host)


def status(authorization: str | None) -> int:
    """Knock at a guarded application that answers 204, and return the status of what comes."""
    statuses: list[int] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await Response(status_code=204)(scope, receive, send)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])
            assert dict(message["headers"])[b"x-request-id"]

    async def receive() -> Any:
        raise AssertionError("the guard does not read bodies")

    headers = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
    asyncio.run(Guard(inner, api_key="secret")(scope, receive, send))
    return statuses[0]


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize("shown", ["Bearer secret", "bearer secret", basic("anyone:secret"), basic(":secret")])
def test_the_key_lets_in(shown: str) -> None:
    assert status(shown) == 204


@pytest.mark.parametrize(
    "shown",
    [
        *(
            None,
            "",
            "Bearer",
            "Bearer ",
            "Bearer secre",
            "Bearer secrets",
            "Bearer s\u00e9cret",
            "secret",
            "Digest secret",
            "Basic \u00e9",
            "Basic c2VjcmV0\u00e9",
            "Basic\u00e9 secret",
        ),
        *("Basic secret", "Basic !", basic("secret"), basic("secret:"), basic("a:b:secret")),
    ],
)
def test_anything_else_does_not(shown: str | None) -> None:
    assert status(shown) == 401
