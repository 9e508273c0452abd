"""Extras: one wording of what is missing, for early checks and for the modules that import the packages."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.extras import EXTRAS, check_extra, importing_extra
from quire.config.kv_events import KVEventsConfig
from quire.distributed.kv_events.publisher import KVEventPublisher
from quire.distributed.kv_events.wire import _msgpack
from quire.distributed.kvstore.lmdb_file import _import_lmdb
from quire.distributed.kvstore.remote_store import import_redis
from quire.errors import ConfigError
from quire.fleet.kv_events.subscriber import KVEventSubscriber
from quire.server.state.tracing import RequestTracer

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
# Option -> what imports its packages.
USES: list[tuple[str, Callable[[], Any]]] = [
    ("prefix_cache_dir", _import_lmdb),
    ("prefix_cache_url", import_redis),
    ("kv_events_config", _msgpack.__wrapped__),
    ("kv_events_config", lambda: KVEventPublisher(KVEventsConfig())),
    ("kv_events_config", lambda: KVEventSubscriber("tcp://127.0.0.1:1", None, print, int)),  # type: ignore[arg-type]
    ("otlp_traces_endpoint", lambda: RequestTracer("http://127.0.0.1:1", "0")),
]


@pytest.mark.parametrize(("option", "use"), USES)
def test_a_use_reports_what_the_early_check_does(
    option: str, use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    extra, *modules = EXTRAS[option]
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as early:
        check_extra(option)
    missing = " and ".join(modules)
    assert str(early.value) == f"{option} needs {missing}, not installed here: pip install 'quire[{extra}]'"
    with pytest.raises(ConfigError) as late:
        use()
    assert (str(late.value), late.value.field) == (str(early.value), option)


def test_the_reason_of_a_failed_import_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "prefix_cache_dir", ("disk", "json"))  # a module that is always there
    check_extra("prefix_cache_dir")
    with (
        pytest.raises(
            ConfigError, match=r"prefix_cache_dir needs json, and .* \(a library is damaged\): pip"
        ) as caught,
        importing_extra("prefix_cache_dir"),
    ):
        raise ImportError("a library is damaged")
    assert caught.value.field == "prefix_cache_dir"


def test_extras_are_the_projects_own() -> None:
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    for option, (extra, *modules) in EXTRAS.items():
        assert len(extras[extra]) == len(modules), option


def test_a_module_of_a_package_that_is_missing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "otlp_traces_endpoint", ("otel", "no_such_package.trace"))
    with pytest.raises(ConfigError, match=r"otlp_traces_endpoint needs no_such_package\.trace, not installed here"):
        check_extra("otlp_traces_endpoint")
