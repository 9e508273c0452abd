"""Tests on published files are collected where their folder is, and are marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.published.folders import LLAMA_CPP, TEMPLATES, named

HERE = Path(__file__).parent
# Module -> the folder that it reads, where that is not the folder of templates.
FOLDERS = {"test_llama_cpp.py": LLAMA_CPP}


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without the folder, only the module is collected that says so."""
    is_other = collection_path.parent == HERE and collection_path.name != "test_folders.py"
    has_folder = named(FOLDERS.get(collection_path.name, TEMPLATES)) is not None
    return True if not has_folder and is_other and collection_path.suffix == ".py" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.published)
