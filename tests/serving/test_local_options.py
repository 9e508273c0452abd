"""Where each option of `quire serve --replicas` goes: to the front, to the servers, to both, or to nobody."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quire.cli import serve
from quire.cli.main import build_parser, main
from quire.cli.options import FOREIGN
from quire.config import EngineConfig, option_sections
from quire.errors import ConfigError
from quire.fleet.local import fleet
from quire.fleet.local.settings import EVENTS, LocalSettings, SharedMachine, settings_of_servers
from quire.fleet.routing.failure_policy import FailurePolicy
from quire.server.log_setup import LogSettings
from quire.server.settings import ServerConfig
from tests.config import test_engine_config

MACHINE = SharedMachine(num_cores=8, has_events=True)
KEY = "secret-key"

# Options of the server: how they may be written, and where they go.
FRONT: dict[str, list[str]] = {
    "host": ["--host", "127.0.0.2"],
    "port": ["--port", "80"],
    "uds": ["--uds", "/run/quire"],
    "ssl_certfile": ["--ssl-certfile", "a.pem"],
    "ssl_keyfile": ["--ssl-certfile", "a.pem", "--ssl-keyfile", "b.pem"],
    "allow_origin": ["--allow-origin", "https://a.example"],
    "allowed_origins": ["--allowed-origins", '["https://a.example"]'],
    "max_connections": ["--max-connections", "9"],
}
BOTH: dict[str, list[str]] = {
    "api_key": ["--api-key", KEY],
    "operator_key": ["--operator-key", KEY],
    "tenant_header": ["--tenant-header", "X-Tenant"],
    "receive_timeout": ["--receive-timeout", "3"],
    "send_timeout": ["--send-timeout", "3"],
    "keep_alive_timeout": ["--keep-alive-timeout", "3"],
    "drain_timeout": ["--drain-timeout", "3"],
    "ping_interval": ["--ping-interval", "3"],
    "log_interval": ["--log-interval", "3"],
    "default_chat_template_kwargs": ["--default-chat-template-kwargs", '{"a": [1, null]}'],
    "tool_call_parser": ["--tool-call-parser", "hermes"],
    "reasoning_parser": ["--reasoning-parser", "none"],
    "reasoning_content": ["--reasoning-content"],
    "allow_runtime_lora_updating": ["--allow-runtime-lora-updating"],
    "max_body_bytes": ["--max-body-bytes", "1MiB"],
    "max_prompts": ["--max-prompts", "3"],
    "max_request_logprobs": ["--max-request-logprobs", "3"],
    "log_requests": ["--log-requests"],
    "log_prompts": ["--log-requests", "--log-prompts", "3"],
    "log_format": ["--log-format", "json"],
    "log_level": ["--log-level", "error"],
    "otlp_traces_endpoint": ["--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"],
}
POLICY_FLAGS = {
    "--eject-failures": "eject_failures",
    "--eject-rate": "eject_rate",
    "--eject-time": "eject_time_s",
    "--max-eject-time": "max_eject_time_s",
    "--max-ejected": "max_ejected",
    "--retry-share": "retry_share",
    "--retry-min-per-second": "retry_min_per_s",
    "--first-byte-timeout": "first_byte_timeout_s",
    "--idle-timeout": "idle_timeout_s",
}
# Those of the command itself, and one that several servers cannot have.
COMMAND = {"help", "config", "replicas", "model_flag"}
REFUSED = {"watch"}
# Those of the proxy where servers fail.
POLICY = {flag.removeprefix("--").replace("-", "_") for flag in POLICY_FLAGS}


class Started(NamedTuple):
    """What `serve_replicas` was called with, and the servers' options after their way to another process."""

    number: int
    front: ServerConfig
    policy: FailurePolicy
    servers: LocalSettings


def started(*arguments: str) -> Started:
    """Run `quire serve` as far as it starts servers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _started(monkeypatch, arguments)


@pytest.fixture(scope="module")
def plain() -> Started:
    """Two servers without further options."""
    return started("--replicas", "2")


def _started(monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]) -> Started:
    calls: list[Started] = []

    def serve_replicas(
        count: int,
        engine: EngineConfig,
        config: ServerConfig,
        log: LogSettings,
        policy: FailurePolicy,
        _: socket.socket,
    ) -> int:
        settings = settings_of_servers(count, engine, config, log, MACHINE)
        calls.append(Started(count, config, policy, LocalSettings.from_json(settings.to_json())))
        return 0

    monkeypatch.setattr(fleet, "serve_replicas", serve_replicas)
    monkeypatch.setattr(serve, "bind_server", lambda _: nullcontext())
    assert main(["serve", *arguments]) == 0
    (call,) = calls
    return call


def options_of_serve() -> set[str]:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return {action.dest for action in commands.choices["serve"]._actions}


def test_every_option_of_serve_has_a_place() -> None:
    options = {name for name in options_of_serve() if not name.startswith(FOREIGN)} - {"speculative_config"}
    places = [FRONT.keys(), BOTH.keys(), COMMAND, REFUSED, POLICY, option_sections().keys()]
    assert set().union(*places) == options
    assert sum(map(len, places)) == len(options)


@pytest.mark.parametrize(("flag", "field"), POLICY_FLAGS.items())
def test_options_for_servers_that_fail_go_to_the_proxy(flag: str, field: str, plain: Started) -> None:
    value = 7 if field == "eject_failures" else 0.75
    changed = started("--replicas", "2", flag, str(value))
    assert changed._replace(policy=plain.policy) == plain
    assert changed.policy == replace(FailurePolicy(), **{field: value})  # type: ignore[arg-type]


def test_options_for_servers_that_fail_need_several(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--eject-time", "3"]) == 2
    assert "--eject-time is an option of several servers: give --replicas too, got 3.0" in capsys.readouterr().err


@pytest.mark.parametrize("name", FRONT)
def test_options_of_the_address_go_to_the_front_alone(name: str, plain: Started) -> None:
    changed = started("--replicas", "2", *FRONT[name])
    assert changed.front != plain.front
    assert changed.servers == plain.servers


@pytest.mark.parametrize("name", BOTH)
def test_all_other_options_go_to_the_servers_too(name: str, plain: Started) -> None:
    changed = started("--replicas", "2", *BOTH[name])
    assert changed.servers != plain.servers
    for field in ServerConfig.__dataclass_fields__:
        if getattr(changed.front, field) != getattr(plain.front, field):
            assert getattr(changed.servers.server, field) == getattr(changed.front, field), field


(ROWS,) = (
    mark.args[1]
    for mark in test_engine_config.test_an_option_is_taken_or_refused_by_name_and_value.pytestmark
    if mark.name == "parametrize"
)
# A server has values of its own for these, where none is given.
OWN: dict[str, Any] = {"num_threads": 4, "kv_events_config": EVENTS}


@pytest.mark.parametrize(("name", "good"), [row[:2] for row in ROWS if row[0] != "record_memory"])
def test_options_of_the_engine_arrive_unchanged(name: str, good: list[Any]) -> None:
    for value in good:
        engine = EngineConfig.from_options(**{name: value}, **test_engine_config.NEEDED.get(name, {}))
        if name == "kv_transfer_config" and value is not None:
            continue  # tested below
        settings = settings_of_servers(2, engine, ServerConfig(), LogSettings(), MACHINE)
        arrived = LocalSettings.from_json(settings.to_json())
        assert arrived == settings
        sent, expected = arrived.engine.to_options(), engine.to_options()
        assert sent.pop("kv_cache_memory_fraction") == expected.pop("kv_cache_memory_fraction") / 2
        changed = {key for key in expected if sent[key] != expected[key]}
        assert changed <= OWN.keys()
        assert all(expected[key] is None for key in changed)


def test_servers_share_cores_and_memory_and_publish_events() -> None:
    def of(count: int, machine: SharedMachine = MACHINE, **options: Any) -> dict[str, Any]:
        engine = EngineConfig.from_options(**options)
        settings = settings_of_servers(count, engine, ServerConfig(), LogSettings(), machine)
        return settings.engine.to_options()

    assert [of(count)["num_threads"] for count in (1, 2, 3, 9)] == [8, 4, 2, 1]
    assert of(2, tensor_parallel_size=2)["num_threads"] == 2
    assert of(2, tensor_parallel_size=2, cpu_bind="0-1|2-3")["num_threads"] is None
    assert of(2, num_threads=7)["num_threads"] == 7
    assert [of(count)["kv_cache_memory_fraction"] for count in (1, 2, 4)] == [0.5, 0.25, 0.125]
    assert of(4, kv_cache_memory_fraction=1.0)["kv_cache_memory_fraction"] == 0.25
    assert of(2)["kv_events_config"] == EVENTS
    assert of(2, enable_prefix_caching=False)["kv_events_config"] is None
    assert of(2, SharedMachine(num_cores=8, has_events=False))["kv_events_config"] is None
    null = {"enable_kv_cache_events": False}
    assert of(2, kv_events_config=null)["kv_events_config"] == null


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("record_memory", "memory.log", "can write the file 'memory.log'"),
        ("kv_events_config", {"enable_kv_cache_events": True}, "can listen at tcp://127.0.0.1:5557"),
        (
            "kv_events_config",
            {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "ipc:///run/a"},
            "can listen at ipc:///run/a",
        ),
        ("kv_transfer_config", {"kv_role": "kv_both"}, "can listen at kv_port 14579; 0 takes a free one"),
    ],
)
def test_what_only_one_server_can_have_is_refused(name: str, value: Any, why: str) -> None:
    with pytest.raises(ConfigError, match="cannot be combined with several servers") as refused:
        settings_of_servers(2, EngineConfig.from_options(**{name: value}), ServerConfig(), LogSettings(), MACHINE)
    assert refused.value.field == name
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_events_config", {"enable_kv_cache_events": True, "endpoint": "tcp://10.0.0.1:5557"}),
        ("kv_events_config", {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}),
        ("kv_transfer_config", {"kv_role": "kv_both", "kv_port": 0}),
        ("kv_transfer_config", {"kv_role": "kv_consumer"}),
    ],
)
def test_what_all_servers_can_have_is_taken(name: str, value: Any) -> None:
    engine = EngineConfig.from_options(**{name: value})
    settings = settings_of_servers(2, engine, ServerConfig(), LogSettings(), MACHINE)
    assert getattr(settings.engine.cache, name) == getattr(engine.cache, name)
    assert LocalSettings.from_json(settings.to_json()) == settings


def test_one_terminal_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "bind_server", lambda _: nullcontext())
    assert main(["serve", "--replicas", "2", "--watch"]) == 2
    assert "watch cannot be combined with several servers" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["flag", "one word", "abbreviated", "toml", "json"])
def test_no_way_to_write_replicas_reaches_a_server(way: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('model = "bundled"\nreplicas = 3\nport = 9\napi-key = "k"\n')
    (tmp_path / "a.json").write_text('{"model": "bundled", "replicas": 3, "port": 9, "api-key": "k"}')
    written = {
        "flag": ["bundled", "--replicas", "3", "--port", "9", "--api-key", "k"],
        "one word": ["--replicas=3", "--port=9", "--api-key=k"],
        "abbreviated": ["bundled", "--repl", "3", "--por", "9", "--api-k", "k"],
        "toml": ["--config", str(tmp_path / "a.toml")],
        "json": ["--config", str(tmp_path / "a.json")],
    }
    call = started(*written[way])
    assert (call.number, call.front.port, call.front.api_key) == (3, 9, "k")
    assert "replicas" not in call.servers.to_json()
    assert (call.servers.server.port, call.servers.server.api_key) == (0, "k")


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "from the environment")
    call = started("--replicas", "2")
    monkeypatch.setenv("QUIRE_API_KEY", "later")
    assert LocalSettings.from_json(call.servers.to_json()).server.api_key == "from the environment"


@pytest.mark.parametrize("count", ["0", "65", "-1"])
def test_a_number_of_servers_that_is_not_allowed_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--replicas", count, "--port", "0"]) == 2
    assert f"replicas must be from 1 to 64, got {count}" in capsys.readouterr().err


def test_torchrun_starts_no_replicas(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert main(["serve", "--replicas", "2", "--tensor-parallel-size", "2"]) == 2
    assert "replicas must be 1 where torchrun starts the ranks of one server, got 2" in capsys.readouterr().err
