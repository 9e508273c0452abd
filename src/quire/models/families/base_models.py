"""Checkpoints of a model without its output head, such as those of embedding models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quire.models.tensors.stored_tensor import StoredTensor

# Field that is added to the configuration of a checkpoint that has no head at all.
HEADLESS: Final = "quire_headless"
HEAD = "lm_head."


def causal_name(name: str) -> str:
    """Return the architecture with a head of one without: `Qwen3ForCausalLM` of `Qwen3Model`; others are unchanged."""
    return name.removesuffix("Model").removesuffix("Text") + "ForCausalLM" if name.endswith("Model") else name


def with_head(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> tuple[Mapping[str, Any], Mapping[str, StoredTensor]]:
    """Return a checkpoint under the names that it has with a head.

    A model that was saved without its head has no "model." before its names. Where the head is not the embedding, it is
    missing: the embedding stands in for it, and the configuration gets the field `HEADLESS`.
    """
    if "embed_tokens.weight" not in tensors:
        return config, tensors
    named = {name if name.startswith(HEAD) else f"model.{name}": stored for name, stored in tensors.items()}
    has_head = config.get("tie_word_embeddings") is True or any(name.startswith(HEAD) for name in named)
    return config if has_head else {**config, "tie_word_embeddings": True, HEADLESS: True}, named
