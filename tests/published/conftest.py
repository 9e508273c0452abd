"""Tests on published files are collected where their folder is, and are marked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.published.folders import TEMPLATES, named

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without the folder, only the module is collected that says so."""
    is_other = collection_path.parent == HERE and collection_path.name != "test_folders.py"
    return True if named(TEMPLATES) is None and is_other and collection_path.suffix == ".py" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.published)
