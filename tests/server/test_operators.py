"""Routes that need the operator's key, and what clients and tenants see of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import ConfigError
from quire.server.settings import ServerConfig
from tests.server.conftest import KEY
from tests.server.process import PATIENCE_S, ServerProcess, running
from tests.server.test_errors import check_form

OPERATOR = "an operator's secret"
HEADER = "X-Tenant"
OPERATION = [
    ("GET", "/metrics"),
    ("GET", "/status"),
    ("GET", "/kv"),
    ("GET", "/kv/map"),
    ("GET", "/kv/block"),
    ("GET", "/kv/request"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/pin_prefix"),
    ("POST", "/unpin_prefix"),
]
CLIENTS = [("GET", "/version"), ("GET", "/v1/models"), ("POST", "/tokenize"), ("POST", "/v1/completions")]
FLAGS = ("--num-kv-blocks", "300", "--pin-limit", "0.1")


@pytest.fixture(scope="module")
def guarded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with a key for clients and one for operators, whose requests `http` makes."""
    log = tmp_path_factory.mktemp("logs") / "guarded.log"
    with running(folder, log, *FLAGS, "--operator-key", OPERATOR, key=KEY) as process:
        process.http.headers["authorization"] = f"Bearer {OPERATOR}"
        yield process


@pytest.fixture(scope="module")
def gated(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with tenants, and no key for operators."""
    log = tmp_path_factory.mktemp("logs") / "gated.log"
    with running(folder, log, *FLAGS, "--tenant-header", HEADER, key=KEY) as process:
        yield process


def ask(server: ServerProcess, method: str, path: str, key: str | None, **options: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.request(method, server.url + path, headers=headers, timeout=PATIENCE_S, **options)


@pytest.mark.parametrize(("method", "path"), OPERATION)
def test_a_clients_key_does_not_open_what_is_the_operators(guarded: ServerProcess, method: str, path: str) -> None:
    refused = ask(guarded, method, path, KEY)
    assert check_form(refused.text, 403)["code"] == "operator_only"
    assert refused.status_code == 403
    for key in (None, "wrong", KEY + "x"):
        refused = ask(guarded, method, path, key)
        assert refused.status_code == 401
        assert check_form(refused.text, 401)["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"].startswith("Basic")
    # A body or a number that is missing is what an operator gets to hear of.
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    with httpx.stream(method, guarded.url + path, headers=headers, timeout=PATIENCE_S) as answer:
        assert answer.status_code in (200, 400, 415)


@pytest.mark.parametrize(("method", "path"), CLIENTS)
def test_an_operator_may_do_what_clients_do(guarded: ServerProcess, method: str, path: str) -> None:
    body = {"json": {"prompt": "a", "max_tokens": 1}} if method == "POST" else {}
    for key in (KEY, OPERATOR):
        assert ask(guarded, method, path, key, **body).status_code == 200
    assert ask(guarded, method, path, None, **body).status_code == 401


@pytest.mark.slow
def test_without_a_key_for_clients_the_operators_counts(folder: Path, tmp_path: Path) -> None:
    with running(folder, tmp_path / "log", *FLAGS, "--operator-key", OPERATOR) as server:
        assert ask(server, "GET", "/version", None).status_code == 200
        refused = ask(server, "GET", "/status", None)
        assert (refused.status_code, refused.headers["www-authenticate"][:5]) == (401, "Basic")
        assert ask(server, "GET", "/status", "wrong").status_code == 403
        assert ask(server, "GET", "/status", OPERATOR).status_code == 200


def computed(server: ServerProcess, key: str, **options: Any) -> dict[str, dict[str, float]]:
    """Return computed tokens by reason, as `/kv` and as `/metrics` have them."""
    in_kv = ask(server, "GET", "/kv", key, **options).json()["first_time"]["computed_by_reason"]
    in_metrics = {}
    for line in ask(server, "GET", "/metrics", key).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("vllm:prompt_tokens_computed_by_reason_total{") and 'admission="first"' in name:
            in_metrics[name.partition('reason="')[2].partition('"')[0]] = float(value)
    return {"kv": in_kv, "metrics": in_metrics}


def test_operators_and_clients_see_the_same_reasons(guarded: ServerProcess, server: ServerProcess) -> None:
    """The server does not reveal the prompts of another namespace: their tokens count as not cached."""
    prompt = list(range(20, 90))
    for asked, key in ((guarded, OPERATOR), (server, "none")):
        before = computed(asked, key)
        for salt in ("one", "two"):
            body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
            assert asked.post("/v1/completions", body).status_code == 200
        after = computed(asked, key)
        for where in ("kv", "metrics"):
            change = {reason: count - before[where][reason] for reason, count in after[where].items()}
            assert change == {"not_cached": 2 * 69, "evicted": 0, "group": 0, "limit": 0, "last_token": 2}


def first_map(server: ServerProcess, tenant: str) -> dict[str, Any]:
    """Return the first event of the map that has requests of anybody."""
    with server.http.stream("GET", "/kv/map", headers={HEADER: tenant}) as stream:
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        return next(event for event in events if event["queue"]["running"])


def test_a_tenant_sees_only_its_own_and_may_not_reset(gated: ServerProcess) -> None:
    def seen(path: str, tenant: str) -> Any:
        return gated.http.get(path, headers={HEADER: tenant}).json()

    long = {"prompt": "Z", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with gated.http.stream("POST", "/v1/completions", json=long, headers={HEADER: "acme"}) as response:
        lines = response.iter_lines()  # kept: its end would end the request
        next(lines)
        assert len(seen("/status", "acme")["requests"]) == 1
        assert seen("/status", "zeta")["requests"] == []
        own, others = first_map(gated, "acme"), first_map(gated, "zeta")
        (row,) = own["requests"]
        assert (own["runs"] != others["runs"], others["requests"]) == (True, [])
        number = f"/kv/request?number={row['number']}"
        table = seen(number, "acme")["samples"][0]["tables"][0]
        assert gated.http.get(number, headers={HEADER: "zeta"}).status_code == 404
        block = f"/kv/block?pool=0&block={table[0]}"
        assert seen(block, "acme")["held_by"][0]["number"] == row["number"]
        assert seen(block, "acme")["token_ids"]
        foreign = seen(block, "zeta")
        assert (foreign["held_by"], foreign["holders"], foreign["token_ids"], foreign["text"]) == ([], None, None, None)
    for tenant in ("acme", "a"):
        pin = gated.http.post("/pin_prefix", json={"name": "p", "prompt": [9] * 40}, headers={HEADER: tenant})
        assert pin.status_code == 200
    assert set(seen("/kv", "acme")["pins"]["tokens"]) == {"acme/p"}
    assert set(seen("/kv", "a")["pins"]["tokens"]) == {"a/p"}
    assert seen("/kv", "zeta")["pins"]["tokens"] == {}
    for path in ("/status", "/kv", "/kv/map"):
        assert check_form(gated.http.get(path).text, 400)["code"] == "no_tenant"
    refused = gated.http.post("/reset_prefix_cache", headers={HEADER: "acme"})
    assert (refused.status_code, check_form(refused.text, 403)["code"]) == (403, "operator_only")


def test_a_page_of_another_site_cannot_reset_anything(server: ServerProcess) -> None:
    foreign = {"Origin": "https://evil.example"}
    fetched = {"Sec-Fetch-Site": "cross-site"}
    for headers in (foreign, foreign | {"Content-Type": "text/plain"}, {"Origin": "null"}, fetched):
        refused = server.http.post("/reset_prefix_cache", headers=headers)
        assert (refused.status_code, check_form(refused.text, 415)["code"]) == (415, "unsupported_media_type")
    # A browser sends this type only after a preflight request, which is refused.
    asked = {**foreign, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert server.http.options("/reset_prefix_cache", headers=asked).status_code == 405
    assert server.http.post("/reset_prefix_cache").status_code == 200


@pytest.mark.parametrize("key", ["", " ", "schl\u00fcssel"])
def test_a_key_that_cannot_be_shown_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(operator_key=key)
    assert caught.value.field == "operator_key"


def test_the_two_keys_differ_and_are_not_shown() -> None:
    with pytest.raises(ConfigError, match="operator_key must differ from api_key"):
        ServerConfig(api_key="same", operator_key="same")
    assert "secret" not in repr(ServerConfig(operator_key="secret"))
