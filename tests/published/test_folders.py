"""The folders of published templates, calls and sources."""

from __future__ import annotations

import pytest

from tests.published.folders import CALLS, LLAMA_CPP, TEMPLATES, named, templates


def test_the_folder_has_templates() -> None:
    if named(TEMPLATES) is None:
        pytest.skip(f"{TEMPLATES} names no folder with NAME.jinja: see tests/published/README.md")
    assert templates(), f"{named(TEMPLATES)} has no NAME.jinja"


def test_the_folder_has_calls() -> None:
    folder = named(CALLS)
    if folder is None:
        pytest.skip(f"{CALLS} names no folder of function calls: see tests/published/README.md")
    assert list(folder.glob("possible_answer/*.json")), f"{folder} has no possible_answer/NAME.json"


def test_the_folder_has_a_converter() -> None:
    folder = named(LLAMA_CPP)
    if folder is None:
        pytest.skip(f"{LLAMA_CPP} names no folder of llama.cpp: see tests/published/README.md")
    assert (folder / "conversion").is_dir(), f"{folder} has no folder conversion"
