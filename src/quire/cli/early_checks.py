"""Checks of models, folders and options before torch is imported, which takes seconds."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from quire.cli.options import engine_options
from quire.config import EngineConfig
from quire.config.hints import drop_neutral
from quire.errors import ConfigError


def checked_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of an engine for `LLM(...)`, checked.

    Raises:
        ConfigError: an option, a model or a folder that `check_files` refuses.
    """
    options = drop_neutral(engine_options(args))
    check_files(EngineConfig.from_options(**options))
    return options


def check_files(config: EngineConfig) -> None:
    """Check that local models are there and have a built-in architecture, and that folders can be written.

    Raises:
        ConfigError: one of them cannot be used.
    """
    from quire.models.checkpoint import is_local, read_config
    from quire.models.families import read_model
    from quire.models.quantization_config import without_quantization

    revision = config.model.revision
    for model in (config.model.model, config.speculative.draft_model):
        # The hub is asked once, when the model is loaded; the header of a GGUF file may take long.
        if model is not None and is_local(model) and not Path(model).expanduser().is_file():
            read_model(without_quantization(read_config(model, revision if model == config.model.model else None)))
    folder = config.cache.prefix_cache_dir
    if folder is not None and not _can_be_written(Path(folder)):
        raise ConfigError(f"prefix_cache_dir {folder!r} is no folder that can be written", field="prefix_cache_dir")


def _can_be_written(folder: Path) -> bool:
    """Return whether a folder can be written, or made where it does not exist."""
    known = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return known.is_dir() and os.access(known, os.W_OK | os.X_OK)
