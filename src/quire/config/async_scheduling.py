"""Options that asynchronous scheduling does not support, and the choice of the scheduler."""

from __future__ import annotations

from typing import Any, Final

from quire.config.checks import check_served
from quire.errors import ConfigError

# Options with the supported values, and the reason why others are not supported.
_SERVED: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "pipeline_parallel_size": ((1,), "stages plan ahead in another way, with microbatches"),
}


def check_served_async(options: dict[str, Any]) -> None:
    """Refuse options that asynchronous scheduling does not support, if it is requested."""
    if options["async_scheduling"]:
        check_served(options, _SERVED, "async_scheduling")


def is_async(options: dict[str, Any], device: str, *, is_encoder: bool) -> bool:
    """Return whether an engine schedules asynchronously."""
    wanted: bool | None = options["async_scheduling"]
    if wanted and is_encoder:
        raise ConfigError(
            "async_scheduling=True is for models that generate, and this one is an encoder, whose steps wait for no "
            "tokens: leave async_scheduling out",
            field="async_scheduling",
        )
    if wanted is None:
        is_served = all(options[name] in values for name, (values, _) in _SERVED.items())
        return device == "cuda" and is_served and not is_encoder
    return wanted
