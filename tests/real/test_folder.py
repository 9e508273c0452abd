"""The folder of published models."""

from __future__ import annotations

import pytest

from tests.real.models import VARIABLE, encoders, files_with_twins, folder


def test_the_folder_has_models() -> None:
    if folder() is None:
        pytest.skip(f"{VARIABLE} names no folder with NAME.gguf, NAME.twin/ and encoders: see tests/real/README.md")
    assert files_with_twins() or encoders(), f"{folder()} has no NAME.gguf with NAME.twin/, and no encoder"
