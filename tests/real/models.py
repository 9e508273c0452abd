"""Published models in the folder that an environment variable names."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "QUIRE_REAL_MODELS"


def folder() -> Path | None:
    """Return the folder; None without the variable, or where it names none."""
    path = os.environ.get(VARIABLE)
    found = None if path is None else Path(path).expanduser()
    return found if found is not None and found.is_dir() else None


def files() -> list[Path]:
    """Return the GGUF files."""
    return sorted((folder() or Path("/nonexistent")).glob("*.gguf"))


def twin_of(file: Path) -> Path:
    """Return the folder with the dequantised weights of a file."""
    return file.with_suffix(".twin")


def files_with_twins() -> list[Path]:
    """Return the GGUF files whose twins are there."""
    return [file for file in files() if twin_of(file).is_dir()]


def encoders() -> list[Path]:
    """Return the folders of encoders."""
    return sorted(path.parent for path in (folder() or Path("/nonexistent")).glob("*/modules.json"))
