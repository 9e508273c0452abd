"""Published chat templates, function calls and sources, in folders that environment variables name."""

from __future__ import annotations

import os
from pathlib import Path

TEMPLATES = "QUIRE_CHAT_TEMPLATES"
CALLS = "QUIRE_BFCL"
LLAMA_CPP = "QUIRE_LLAMA_CPP"


def named(variable: str) -> Path | None:
    """Return a folder; None without its variable, or where that names none."""
    path = os.environ.get(variable)
    found = None if path is None else Path(path).expanduser()
    return found if found is not None and found.is_dir() else None


def templates() -> dict[str, str]:
    """Return the sources of the templates by name; none without the folder."""
    folder = named(TEMPLATES)
    return {} if folder is None else {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.jinja"))}
