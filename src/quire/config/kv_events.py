"""Options of KV events, under vLLM's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.config.checks import check_flag, check_text, check_whole
from quire.errors import ConfigError, shown

FORMATS = ("map", "array")
PUBLISHERS = ("zmq", "null")
ENDPOINT = re.compile(r"tcp://[^\s/:]+:(\*|\d{1,5})|tcp://\[[0-9a-fA-F:*]+\]:(\*|\d{1,5})|(ipc|inproc)://\S+")
# Addresses of this machine, on which a socket listens; the publisher connects to all others.
LOCAL = re.compile(r"tcp://(\*|0\.0\.0\.0|127\.\d+\.\d+\.\d+|localhost|\[::1?\])(:|$)|ipc:|inproc:")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Publication of KV events.

    Args:
        enable_kv_cache_events: publish blocks that the prefix cache stores and evicts.
        publisher: "zmq", or "null" for none.
        endpoint: address of the event batches. The publisher listens on an address of this machine ("*" as the port
            takes a free one), and connects to any other address.
        replay_endpoint: address at which lost batches can be requested; None for no replays.
        buffer_steps: number of batches that can be replayed.
        hwm: number of batches that are queued for a slow subscriber before it loses some.
        max_queue_size: number of batches that are queued for the publisher before some are dropped.
        topic: topic of the batches.
        form: format of an event: "map" or "array".
    """

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    form: str = "map"

    def __post_init__(self) -> None:
        check_flag("enable_kv_cache_events", self.enable_kv_cache_events)
        for name in ("buffer_steps", "hwm"):
            check_whole(f"kv_events_config: {name}", getattr(self, name), 0)
        check_whole("kv_events_config: max_queue_size", self.max_queue_size, 1)
        if not isinstance(self.topic, str):
            raise ConfigError(f"kv_events_config: topic must be a text, got {shown(self.topic)}", field="topic")
        for name, allowed in (("publisher", PUBLISHERS), ("form", FORMATS)):
            if getattr(self, name) not in allowed:
                shown_value = shown(getattr(self, name))
                shown_name = "kv_events_format" if name == "form" else "kv_events_config: publisher"
                raise ConfigError(
                    f"{shown_name} must be one of {', '.join(allowed)}, got {shown_value}",
                    field=shown_name.split(":")[0],
                )
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is None and name == "replay_endpoint":
                continue
            check_text(f"kv_events_config: {name}", value)
            if not ENDPOINT.fullmatch(value):
                raise ConfigError(
                    f"kv_events_config: {name} must be an address like tcp://127.0.0.1:5557, got {shown(value)}",
                    field="kv_events_config",
                )

    @classmethod
    def read(cls, options: object, form: str) -> KVEventsConfig | None:
        """Return the options in vLLM's mapping; None if events are not published."""
        if options is None:
            return None
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"kv_events_config must be a JSON object or None, got {shown(options)}", field="kv_events_config"
            )
        names = [item.name for item in fields(cls) if item.name != "form"]
        for key in options:
            if key not in names:
                raise ConfigError(
                    f"kv_events_config has the unknown key {shown(key)}; known keys are {', '.join(names)}",
                    field="kv_events_config",
                )
        values: Any = {str(key): value for key, value in options.items()}
        config = cls(form=form, **values)
        return config if config.enable_kv_cache_events and config.publisher != "null" else None

    @staticmethod
    def is_local(endpoint: str) -> bool:
        """Return whether an endpoint is an address of this machine."""
        return LOCAL.match(endpoint) is not None
