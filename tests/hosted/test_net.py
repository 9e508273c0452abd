"""Every causal language model of transformers is served with transformers' tokens, or refused for a true reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Attempt, attempts_of
from tests.hosted.small_configs import MODEL_TYPES

pytestmark = pytest.mark.slow

HISTORIES = ("alone", "batched", "chunked", "hit", "forked", "beams", "recomputed", "swapped")
# What transformers cannot build or run itself, with what it says.
UNBUILDABLE: Mapping[str, str] = {
    "blt": "'BltConfig' object has no attribute 'num_hidden_layers'",
    "dots3_note": "adapter_input_size must match hidden_size",
    "gemma3n": "TimmWrapperModel requires the timm library",
    "gemma4_assistant": "the current Cache seem to only contain LinearAttention layers",
    "gemma4_unified_assistant": "the current Cache seem to only contain LinearAttention layers",
    "musicgen": "'MusicgenConfig' object has no attribute 'dropout'",
    "musicgen_melody": "'MusicgenMelodyConfig' object has no attribute 'dropout'",
    "reformer": "'NoneType' object is not iterable",
    "rwkv": "RwkvForCausalLM cannot use beam search with a cache",
    "xlstm": "xLSTMForCausalLM cannot use beam search with a cache",
}
# Models whose tokens in transformers depend on its cache, or on its attention function: there is no reference.
INEXACT = frozenset({"hrm_text", "moshi"})


@pytest.fixture(scope="module")
def attempt() -> Iterator[Attempt]:
    with attempts_of("tests.hosted.attempts") as attempt:
        yield attempt


def outcome_of(attempt: Attempt, folder: Path, model_type: str, **options: Any) -> dict[str, Any]:
    """Return what came of a model type; an untyped error, a crash or a timeout fails the test."""
    said = attempt(json.dumps({"model_type": model_type, "folder": str(folder), "options": options}))["said"]
    assert said.startswith("{"), said
    return dict(json.loads(said))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tokens_are_those_of_transformers(attempt: Attempt, tmp_path: Path, model_type: str) -> None:
    """Over transformers' modules, also where there is a native family."""
    outcome = outcome_of(attempt, tmp_path / "model", model_type, model_impl="transformers")
    if model_type in UNBUILDABLE:
        assert outcome["outcome"] == "unbuildable"
        assert UNBUILDABLE[model_type] in outcome["why"]
    elif outcome["outcome"] == "refused":
        assert is_true(outcome["hindrance"], outcome["facts"]), outcome
    elif model_type in INEXACT:
        assert (outcome["outcome"], outcome["is_exact"]) == ("served", False)
    else:
        assert outcome == {"outcome": "served", "histories": dict.fromkeys(HISTORIES, "equal"), "is_exact": True}


def is_true(hindrance: str | None, facts: Mapping[str, Any]) -> bool:
    """Tell whether what transformers' own model does bears out the reason of a refusal."""
    fails = facts["error"] is not None
    mixes = facts["mixes_sequences"]
    return {
        # Rows depend on others although attention keeps them apart, or on steps, or running several sequences fails.
        "state": mixes or fails or facts["depends_on_steps"],
        "attention": not facts["layers"],
        "mask": facts["has_own_mask"] or not facts["layers"],
        "shape": mixes or fails,
        "encoder": mixes or fails or not facts["layers"],
    }.get(str(hindrance), False)
