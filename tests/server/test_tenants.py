"""Tenants, as a gateway in front of the server names them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from quire.errors import ConfigError
from quire.server.requests.errors import ApiError
from quire.server.settings import ServerConfig
from quire.server.state.tenants import read_tenant
from tests.server.process import ServerProcess, running

HEADER = "X-Tenant"
# Messages of chats, and prompts.
ROUTES = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


@pytest.fixture(scope="module")
def gated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that gets the tenant of each request in a header; its client has the key of the operator."""
    log = tmp_path_factory.mktemp("logs") / "gated.log"
    flags = ("--num-kv-blocks", "300", "--pin-limit", "0.1", "--tenant-header", HEADER, "--operator-key", "operator")
    with running(folder, log, *flags) as process:
        process.http.headers["authorization"] = "Bearer operator"
        yield process


def ask(server: ServerProcess, path: str, body: dict[str, Any], *tenants: bytes | str) -> httpx.Response:
    headers = [(HEADER.encode(), tenant if isinstance(tenant, bytes) else tenant.encode()) for tenant in tenants]
    return server.http.post(path, json=body, headers=headers)


def details(server: ServerProcess, prompt: list[int], tenant: bytes | str, **body: object) -> dict[str, Any]:
    answer = ask(server, "/v1/completions", {"prompt": prompt, "max_tokens": 1, **body}, tenant)
    assert answer.status_code == 200
    return dict(answer.json()["usage"]["prompt_tokens_details"])


def test_tenants_hit_their_own_and_nobody_else_s(gated: ServerProcess) -> None:
    prompt = list(range(30, 100))
    found = [details(gated, prompt, tenant) for tenant in ("acme", "zeta", "acme", "zeta", b"\xc3\xa0", b"\xc3")]
    assert [each["cached_tokens"] for each in found] == [0, 0, 69, 69, 0, 0]
    # The usage of a prompt that another tenant has computed is that of a prompt that nobody has computed.
    for each in (found[0], found[1], found[4], found[5]):
        assert each["computed_by_reason"] == {
            "not_cached": 69,
            "evicted": 0,
            "group": 0,
            "limit": 0,
            "last_token": 1,
        }


def test_a_salt_parts_a_tenant_and_joins_no_two(gated: ServerProcess) -> None:
    prompt = list(range(60, 130))
    salts = (("acme", "s"), ("acme", None), ("zeta", "s"), ("acme", "s"))
    found = [details(gated, prompt, tenant, cache_salt=salt)["cached_tokens"] for tenant, salt in salts]
    assert found == [0, 0, 0, 69]


@pytest.mark.parametrize("path", [*ROUTES, "/pin_prefix", "/unpin_prefix"])
@pytest.mark.parametrize(
    ("tenants", "got"), [((), "none"), (("",), "an empty one"), (("a", "b"), "2 of them"), (("a" * 257,), "257 bytes")]
)
def test_nobody_is_let_in_without_one_tenant(
    gated: ServerProcess, path: str, tenants: tuple[str, ...], got: str
) -> None:
    value = [{"role": "user", "content": "hi"}] if path == "/v1/chat/completions" else [5] * 40
    body = {ROUTES.get(path, "prompt"): value, "name": "x"} | ({"max_tokens": 1} if path in ROUTES else {})
    answer = ask(gated, path, body, *tenants)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (HEADER, "no_tenant")
    assert (
        error["message"] == f"the header {HEADER} must be there once and name a tenant in at most 256 bytes, got {got}"
    )


CONVERSATION = "a conversation of sixteen tokens and more, of another protocol"
TURN = {"messages": [{"role": "user", "content": CONVERSATION}]}
PROTOCOLS: dict[str, dict[str, Any]] = {
    "/v1/messages": {**TURN, "max_tokens": 1},
    "/v1/responses": {"input": CONVERSATION, "max_output_tokens": 1},
    "/api/chat": {**TURN, "options": {"num_predict": 1}, "stream": False},
    "/api/generate": {"prompt": CONVERSATION, "options": {"num_predict": 1}, "stream": False},
}


def hits(server: ServerProcess) -> int:
    lines = server.http.get("/metrics").text.splitlines()
    (line,) = (line for line in lines if line.startswith("vllm:prefix_cache_hits_total"))
    return int(float(line.split()[-1]))


@pytest.mark.parametrize("path", PROTOCOLS)
def test_other_protocols_have_tenants_and_salts_too(gated: ServerProcess, path: str) -> None:
    body = PROTOCOLS[path]
    refused = ask(gated, path, body)
    assert refused.status_code == 400
    assert f"the header {HEADER} must be there once" in refused.text
    found = []
    for number, tenant in enumerate((f"a{path}", f"b{path}", f"a{path}", f"a{path}")):
        before = hits(gated)
        answer = ask(gated, path, {**body, "cache_salt": "salt"} if number == 3 else body, tenant)
        assert answer.status_code == 200, answer.text
        found.append(hits(gated) > before)
    assert found == [False, False, True, False]
    for field in ("tenant", "media"):
        refused = ask(gated, path, {**body, field: "acme"}, "acme")
        assert refused.status_code == 400
        assert f"{field} is not supported" in refused.text


@pytest.mark.parametrize("value", [b" \t", b" a\xc2\xa0\t"])
def test_only_what_is_blank_in_a_header_is_no_name(value: bytes) -> None:
    request = Request({"type": "http", "headers": [(HEADER.lower().encode(), value)]})
    config = ServerConfig(tenant_header=HEADER)
    if value.strip(b" \t"):
        assert read_tenant(config, request) == "a\xc2\xa0"
    else:
        with pytest.raises(ApiError, match="got an empty one"):
            read_tenant(config, request)


def test_a_stream_is_refused_before_it_begins(gated: ServerProcess) -> None:
    answer = ask(gated, "/v1/completions", {"prompt": [5, 6], "stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_tenant")


def test_pins_are_a_tenant_s_own(gated: ServerProcess) -> None:
    prompt = list(range(100, 170))
    pin = {"name": "system", "prompt": prompt}
    for tenant in ("a/b", "a"):
        assert ask(gated, "/pin_prefix", pin, tenant).json()["pinned_tokens"] == 64
    assert ask(gated, "/pin_prefix", pin | {"name": "b/system"}, "a").status_code == 200
    names = set(gated.http.get("/kv").json()["pins"]["tokens"])
    assert names == {"a%2Fb/system", "a/system", "a/b/system"}
    assert details(gated, prompt, "a")["cached_tokens"] == 69
    assert details(gated, prompt, "other")["cached_tokens"] == 0
    refused = ask(gated, "/unpin_prefix", {"name": "system"}, "other")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "name")
    for tenant, name in (("a/b", "system"), ("a", "system"), ("a", "b/system")):
        assert ask(gated, "/unpin_prefix", {"name": name}, tenant).status_code == 200
    assert gated.http.get("/kv").json()["pins"]["tokens"] == {}


@pytest.mark.parametrize("field", ["tenant", "media"])
@pytest.mark.parametrize("path", [*ROUTES, "/pin_prefix", "/v1/embeddings", "/v1/score", "/v1/rerank"])
def test_a_body_does_not_say_whose_it_is_nor_bring_media(server: ServerProcess, path: str, field: str) -> None:
    answer = server.post(path, {ROUTES.get(path, "prompt"): [], field: "acme"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_feature")


def test_without_the_option_the_header_means_nothing(server: ServerProcess) -> None:
    prompt = list(range(170, 240))
    first, *others = (details(server, prompt, tenant)["cached_tokens"] for tenant in ("acme", "zeta", ""))
    # Another test's prompt may begin with the same token.
    assert first < 8
    assert others == [69, 69]


@pytest.mark.parametrize("name", ["", " ", "X Tenant", "X-Tenant:", "T\u00e9nant", "a\r\nb"])
def test_what_is_no_header_s_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="tenant_header must be the name of a header") as caught:
        ServerConfig(tenant_header=name)
    assert caught.value.field == "tenant_header"
