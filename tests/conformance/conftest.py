"""One random checkpoint of each family, and the bundled model, for all tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.models.checkpoint import locate
from quire.text.tokenizer import Tokenizer
from tests.conformance.checkpoints import (
    EOS_TOKEN_ID,
    FAMILIES,
    POOL_FACTORS,
    generate_with_transformers,
    ragged_prompts,
    save_checkpoint,
)

STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "


# Histories of what differs little from another family: not in the default suite, which is to stay short.
VARIANTS = frozenset({"falcon-h1-norm", "gemma4-keys-as-values", "llama2", "mistral", "qwen2", "qwen2-window"})


class Reference(NamedTuple):
    """A checkpoint, prompts, and what transformers continues them with.

    Args:
        pool_factor: how many times larger a pool must be than one of attention alone.
    """

    folder: Path
    prompts: list[list[int]]
    outputs: list[list[int]]
    pool_factor: int


@pytest.fixture(
    scope="session",
    params=[
        *(pytest.param(name, marks=[pytest.mark.slow] if name in VARIANTS else []) for name in sorted(FAMILIES)),
        "bundled",
    ],
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return a family's checkpoint, or the bundled model, with its expected outputs."""
    if request.param == "bundled":
        folder = locate("bundled")
        encode = Tokenizer.from_folder(folder).encode
        prompts = [encode(STORY * 2 + "Then"), encode("Tom"), encode(STORY + "But"), encode(STORY * 2), encode(STORY)]
        prompts += [encode("The old sailor"), encode(STORY + "The next day")]
        end_token_ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    else:
        folder = save_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
        prompts, end_token_ids = ragged_prompts(), [EOS_TOKEN_ID]
    outputs = generate_with_transformers(folder, prompts, end_token_ids)
    return Reference(folder, prompts, outputs, POOL_FACTORS.get(request.param, 1))
