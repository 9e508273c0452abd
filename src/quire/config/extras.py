"""Optional packages: the extra that each option needs, and the error if one of its packages is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from quire.errors import ConfigError

# Option -> the extra that it needs, and the extra's modules.
EXTRAS = {
    "prefix_cache_dir": ("disk", "lmdb"),
    "prefix_cache_url": ("remote", "redis"),
    "kv_events_config": ("events", "msgspec", "zmq"),
    "model_impl": ("transformers", "transformers"),
    "otlp_traces_endpoint": ("otel", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


def check_extra(option: str) -> None:
    """Check that the packages of an option are installed, without importing them.

    Args:
        option: an option of `EXTRAS`.

    Raises:
        ConfigError: a package is missing; the error names the option, the package and the extra.
    """
    extra, *modules = EXTRAS[option]
    missing = [module for module in modules if not is_installed(module)]
    if missing:
        raise ConfigError(
            f"{option} needs {' and '.join(missing)}, not installed here: pip install 'quire[{extra}]'", field=option
        )


@contextmanager
def importing_extra(option: str) -> Iterator[None]:
    """Turn a failed import of a package of an option into the error of `check_extra`.

    Raises:
        ConfigError: a package is missing, or cannot be imported (with the reason); the error names the option.
    """
    try:
        yield
    except ImportError as error:
        check_extra(option)
        extra, *modules = EXTRAS[option]
        raise ConfigError(
            f"{option} needs {' and '.join(modules)}, and an import failed ({error}): pip install 'quire[{extra}]'",
            field=option,
        ) from error


def is_installed(module: str) -> bool:
    """Return whether a module can be found; it is not imported."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package of the module
        return False
