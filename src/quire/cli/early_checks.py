"""Checks of models, folders and options before torch is imported, which takes seconds."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.cli.options import engine_options
from quire.config import EngineConfig
from quire.config.cache import CacheConfig
from quire.config.extras import check_extra
from quire.config.hints import drop_neutral
from quire.errors import ConfigError
from quire.platform.bounded.files import user_path


def checked_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the checked options of an engine for `LLM(...)`."""
    options = drop_neutral(engine_options(args))
    check_files(EngineConfig.from_options(**options))
    return options


def check_files(config: EngineConfig) -> None:
    """Check that packages are installed, that models exist and are supported, and that folders can be written."""
    from quire.models.families.quantization_config import check_stored_method
    from quire.models.hosted.choice import is_hosted, read_model

    _check_packages(config.cache)
    revision = config.model.revision
    for model in filter(None, (config.model.model, config.speculative.draft_model)):
        raw = check_model(model, revision if model == config.model.model else None)
        if raw is None:
            continue
        if not is_hosted(raw, config.model.model_impl):  # else its modules are built with the engine
            read_model(raw, config.model.model_impl)
        if model == config.model.model:
            check_stored_method(config.model.stored_quantization, raw, is_gguf=False)
    template = config.model.chat_template
    if template is not None and not os.path.isfile(user_path(template)):
        raise ConfigError(f"chat_template {template!r} is no file", field="chat_template")
    folder = config.cache.prefix_cache_dir
    if folder is not None and not _can_be_written(user_path(folder)):
        raise ConfigError(f"prefix_cache_dir {folder!r} is no folder that can be written", field="prefix_cache_dir")


def check_model(model: str, revision: str | None) -> Mapping[str, Any] | None:
    """Check that a model has its files, and return its `config.json`; None for GGUF.

    GGUF is skipped: a header may take long to read, and a file on the hub (NAME:QUANTISATION) long to fetch.
    """
    from quire.models.checkpoints.checkpoint import check_weights, find_gguf, read_config

    path = user_path(model)
    if (":" in model and not os.path.exists(path)) or find_gguf(model, revision) is not None:
        return None
    raw = read_config(model, revision)
    if os.path.isdir(path):
        check_weights(path)
    return raw


def _check_packages(config: CacheConfig) -> None:
    """Check that the packages of options are installed; otherwise the error would come after the model is loaded."""
    wanted = [name for name in ("prefix_cache_dir", "prefix_cache_url") if getattr(config, name) is not None]
    if config.kv_events is not None:
        wanted.append("kv_events_config")
    for option in wanted:
        check_extra(option)


def check_output(field: str, path: str) -> None:
    """Refuse the path of a file that is written after long work, if its folder does not exist or is not writable."""
    folder = os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{field} {path} cannot be written: it is no file in a folder that can be", field=field)


def _can_be_written(folder: Path) -> bool:
    """Return whether a folder can be written, or created if it does not exist."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    return os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
