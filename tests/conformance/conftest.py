"""One random checkpoint of each family, and the bundled model, for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.models.checkpoints.checkpoint import locate
from quire.text.tokenizers.tokenizer import Tokenizer
from tests.conformance.checkpoints import (
    EOS_TOKEN_ID,
    FAMILIES,
    POOL_FACTORS,
    generate_with_transformers,
    ragged_prompts,
    save_checkpoint,
)

STORY = "Once upon a time, a small fox found a red kite in the forest. The fox was happy, and wanted to fly it. "


# One family of each kind of cache, by what its layers keep: all tokens, windows beside all tokens (and layers that read
# the cache of others), chunks, states beside tokens, both in every layer. A history stresses the cache, not the family:
# the default run has the histories of these, the slow run those of every family. (`tests/models` compares the logits of
# every family in the default run.)
REPRESENTATIVES = frozenset({"llama3", "gemma4", "llama4", "qwen3.5", "falcon-h1"})
# What other modules than the histories run by default: tokens beside states, the kind that has most to go wrong.
CORE = frozenset({"qwen3.5"})
# And in the slow run of CI: a family of each kind of cache and of each kind of layers.
KINDS = CORE | {"llama3", "gemma4", "gemma4-moe", "gpt-oss", "llama4", "mistral-window", "falcon-h1", "lfm2-moe"}
NAMES = (*sorted(FAMILIES), "bundled")


class Reference(NamedTuple):
    """A checkpoint, prompts, and what transformers continues them with.

    Args:
        pool_factor: how many times larger a pool must be than one of attention alone.
    """

    folder: Path
    prompts: list[list[int]]
    outputs: list[list[int]]
    pool_factor: int


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Return a function from a name to its reference, which is made once."""
    return cache(lambda name: make_reference(name, tmp_path_factory))


def make_reference(name: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Save a family's checkpoint, or take the bundled model, and generate its expected outputs."""
    if name == "bundled":
        folder = locate("bundled")
        encode = Tokenizer.from_folder(folder).encode
        prompts = [encode(STORY * 2 + "Then"), encode("Tom"), encode(STORY + "But"), encode(STORY * 2), encode(STORY)]
        prompts += [encode("The old sailor"), encode(STORY + "The next day")]
        end_token_ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    else:
        folder = save_checkpoint(name, tmp_path_factory.mktemp(name))
        prompts, end_token_ids = ragged_prompts(), [EOS_TOKEN_ID]
    outputs = generate_with_transformers(folder, prompts, end_token_ids)
    return Reference(folder, prompts, outputs, POOL_FACTORS.get(name, 1))


def of_each(default: frozenset[str], slow: frozenset[str]) -> Callable[..., Callable[..., Reference]]:
    """Make a fixture: the reference of each family, and of the bundled model.

    Args:
        default: those of the default run.
        slow: those of CI's slow run; all others are marked exhaustive.
    """

    marks = {name: [] if name in default else slow_or_exhaustive(name, slow) for name in NAMES}
    return pytest.fixture(scope="session", params=[pytest.param(name, marks=marks[name]) for name in NAMES])


def slow_or_exhaustive(name: str, slow: Set[str] = KINDS) -> list[pytest.MarkDecorator]:
    """Return the mark of a family's tests that CI runs for some families, and of all others'."""
    return [pytest.mark.slow if name in slow else pytest.mark.exhaustive]


@of_each(REPRESENTATIVES, frozenset(NAMES))
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    """Return the reference of a kind of cache; of every family and the bundled model in the slow run."""
    return references(request.param)


@of_each(CORE, KINDS)
def core_reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    """Return the same, of fewer families in the default run and in that of CI."""
    return references(request.param)
