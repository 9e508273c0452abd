"""Every causal language model of transformers is served with transformers' tokens, or refused for a true reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Attempt, attempts_of
from tests.hosted.small_configs import MODEL_TYPES

HISTORIES = ("alone", "batched", "chunked", "hit", "forked", "beams", "recomputed", "swapped")
# What transformers cannot build or run itself, with what it says.
UNBUILDABLE: Mapping[str, str] = {
    "blt": "'BltConfig' object has no attribute 'num_hidden_layers'",
    "dots3_note": "adapter_input_size must match hidden_size",
    "gemma3n": "TimmWrapperModel requires the PIL library",
    "gemma4_assistant": "the current Cache seem to only contain LinearAttention layers",
    "gemma4_unified_assistant": "the current Cache seem to only contain LinearAttention layers",
    "musicgen": "'MusicgenConfig' object has no attribute 'dropout'",
    "musicgen_melody": "'MusicgenMelodyConfig' object has no attribute 'dropout'",
}


@pytest.fixture(scope="module")
def attempt() -> Iterator[Attempt]:
    with attempts_of("tests.hosted.attempts") as attempt:
        yield attempt


def outcome_of(attempt: Attempt, folder: Path, model_type: str, **options: Any) -> dict[str, Any]:
    """Return what came of a model type; an untyped error, a crash or a timeout fails the test."""
    said = attempt(json.dumps({"model_type": model_type, "folder": str(folder), "options": options}))["said"]
    assert said.startswith("{"), said
    return dict(json.loads(said))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_are_those_of_transformers(attempt: Attempt, tmp_path: Path, model_type: str) -> None:
    outcome = outcome_of(attempt, tmp_path / "model", model_type)
    if model_type in UNBUILDABLE:
        assert outcome["outcome"] == "unbuildable"
        assert UNBUILDABLE[model_type] in outcome["why"]
    elif outcome["outcome"] == "refused":
        assert "is not implemented" in outcome["why"]
    else:
        assert outcome == {"outcome": "served", "histories": dict.fromkeys(HISTORIES, "equal"), "is_exact": True}
