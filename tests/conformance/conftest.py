"""One random checkpoint of each family for all tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conformance.checkpoints import FAMILIES, generate_with_transformers, ragged_prompts, save_checkpoint


class Reference(NamedTuple):
    """A checkpoint, prompts, and what transformers continues them with."""

    folder: Path
    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a family's checkpoint with its expected outputs."""
    folder = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    prompts = ragged_prompts()
    return Reference(folder, prompts, generate_with_transformers(folder, prompts))
